"""`AttentionBackend`: what every way of computing paged attention must provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.spec import AttentionSpec


class AttentionBackend(ABC):
    """Attends one layer at a time, for all slices of a plan.

    Contract: write, then attend. The new tokens' keys and values lie in the cache before `attend` is called, since a
    slice's past may have been written by another slice of the same plan; they are passed densely too, as the cache
    holds them (rounded to its dtype), because the masks describe the past only.
    """

    statistics: ClassVar[frozenset[str]]
    """Names of the per-row statistics that `attend` can collect into `meta.statistics`."""
    needs_row_positions: ClassVar[bool]
    """Whether a plan must bring `row_positions` even for models without a window."""

    def __init__(self) -> None:
        self.slots_read = 0
        """Slots of one layer's cache read so far, summed over layers: times the bytes of a slot, the bytes read."""

    @abstractmethod
    def attend(
        self,
        spec: AttentionSpec,
        q: Tensor,  # [T, num_heads, head_dim], rotated
        k_new: Tensor,  # [T, num_kv_heads, head_dim], rotated
        v_new: Tensor,  # [T, num_kv_heads, head_dim]
        k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
        v_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
        meta: AttentionMetadata,
    ) -> Tensor:
        """[T, num_heads, head_dim] in the dtype of `q`: each query over the live past of its slice and its own chunk.

        Query head `h` reads KV head `h // (num_heads // num_kv_heads)`. No slot outside a slice's live mask is read.
        """
