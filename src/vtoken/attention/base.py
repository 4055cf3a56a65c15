"""`AttentionBackend`: what every way of computing paged attention must provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from vtoken.attention.cache import LayerCache
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.rotation import Rotation
from vtoken.attention.spec import AttentionSpec
from vtoken.policies.statistics import Statistic


class AttentionBackend(ABC):
    """Attends one layer at a time, for all slices of a plan.

    Contract: write, then attend. The new tokens' keys and values lie in the cache before `attend` is called, since a
    slice's past may have been written by another slice of the same plan; they are passed densely too, as the cache
    holds them (rounded to its format), because the masks describe the past only.
    """

    statistics: ClassVar[frozenset[type[Statistic]]]
    """Which a plan may order: what `attend` can add to `meta.tallies`, and what can be read from its cache."""
    compiled: ClassVar[bool]
    """Whether it runs on the compiled kernels; the rest of the worker then does too."""
    needs_row_positions: ClassVar[bool]
    """Whether a plan must bring `row_positions` even for models without a window."""

    def __init__(self) -> None:
        self.slots_read = 0
        """Slots of one layer's cache read so far, summed over layers: times the bytes of a slot, the bytes read."""

    def write(
        self,
        qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim]; may be overwritten
        rotation: Rotation | None,
        cache: LayerCache,
        slots: Tensor,  # [T] int64
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turn queries and keys, store keys and values in their slots, and return what `attend` takes:
        q, k_new, v_new."""
        num_kv_heads, head_dim = cache.keys.cells.shape[1], cache.keys.cells.shape[3]
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        blocks, offsets = slots // cache.block_size, slots % cache.block_size
        return q, cache.keys.write(k, blocks, offsets), cache.values.write(v, blocks, offsets)

    @abstractmethod
    def attend(
        self,
        spec: AttentionSpec,
        q: Tensor,  # [T, num_heads, head_dim], rotated
        k_new: Tensor,  # [T, num_kv_heads, head_dim] float32, rotated
        v_new: Tensor,  # [T, num_kv_heads, head_dim] float32
        cache: LayerCache,
        meta: AttentionMetadata,
    ) -> Tensor:
        """[T, num_heads, head_dim] in the dtype of `q`: each query over the live past of its slice and its own chunk.

        Query head `h` reads KV head `h // (num_heads // num_kv_heads)`. No slot outside a slice's live mask is read.
        """
