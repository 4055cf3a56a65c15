"""transformers' attention interface with attention of ours behind it.

A model that is told to attend by `NAME` calls `_attention` in each layer, with queries and keys already turned, and
asks `_mask` for the masks that it needs. Who runs the model says with `served_by` what becomes of that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

NAME: Final = "vtoken"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a layer asks of attention."""

    query: Tensor  # [1, num_heads, T, head_dim]
    key: Tensor  # [1, num_kv_heads, T, head_dim]
    value: Tensor  # [1, num_kv_heads, T, head_dim]
    mask: Tensor | None
    arguments: Mapping[str, Any]  # all others, by name

    @property
    def qkv(self) -> Tensor:
        """Side by side, as our own models hand them on: [T, (num_heads + 2 * num_kv_heads) * head_dim], fresh."""
        parts = (self.query, self.key, self.value)
        return torch.cat([part[0].transpose(0, 1) for part in parts], dim=1).flatten(1)


ServeAttention = Callable[[AttentionCall], Tensor]  # -> [T, num_heads * head_dim]
MakeMask = Callable[..., Tensor | None]  # takes what transformers' mask functions take


class _Local(threading.local):
    """What this thread's model runs with."""

    attend: ServeAttention | None = None
    make_mask: MakeMask | None = None


_local = _Local()


@contextmanager
def served_by(attend: ServeAttention, make_mask: MakeMask | None = None) -> Iterator[None]:
    """What this thread's model runs with inside the block. Without `make_mask` there are no masks."""
    assert _local.attend is None, "another model is running"
    _local.attend, _local.make_mask = attend, make_mask
    try:
        yield
    finally:
        _local.attend = _local.make_mask = None


def _attention(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Output [1, T, num_heads, head_dim], and no weights."""
    assert _local.attend is not None, "the model runs outside of `served_by`"
    out = _local.attend(AttentionCall(query, key, value, attention_mask, arguments))
    return out.view(1, query.shape[2], query.shape[1], -1), None


def _mask(*args: Any, **arguments: Any) -> Tensor | None:
    make_mask = _local.make_mask
    return None if make_mask is None else make_mask(*args, **arguments)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
