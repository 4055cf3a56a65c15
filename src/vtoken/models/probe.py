"""What the layers of a model of `transformers` ask of attention, found out by running it.

A config says such things in a dozen ways, and code may do otherwise. So the model runs on a few tokens with an
attention function that only takes notes (`read_attention`); then, attending as it would be served, it must give the
logits that transformers itself computes (`check_logits`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from vtoken.attention.spec import AttentionSpec
from vtoken.models.attention_interface import AttentionCall, served_by
from vtoken.models.base import Attend

NOT_BY_INTERFACE: Final = "its layers do not attend by way of transformers' attention interface"

# Arguments of attention, if set, that stand for maths which ours does not have.
_MISSING: Final = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on attention scores",
    "head_mask": "a mask of heads",
    "cu_seq_lens_q": "packed sequences",
}

_FARTHEST: Final = 1 << 20  # positions beyond which no mask is looked at

_TOLERANCE: Final = {torch.float32: 2e-3}  # of the largest logit; narrower types round on the way
_NARROW_TOLERANCE: Final = 0.1


class Unsuited(Exception):
    """The model cannot be served through the interface; the text says why."""


@dataclass(frozen=True)
class AttentionShape:
    """What a model's attention comes to."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[AttentionSpec, ...]  # one a call of attention, in the order of the calls


def read_attention(run: Callable[[Tensor, Tensor], object], num_tokens: int, max_positions: int) -> AttentionShape:
    """Run a model (token ids [T], positions [T] -> anything) and take notes. Raises Unsuited."""
    notes = _Notes(max_positions)
    with served_by(notes.attend, notes.make_mask):
        run(torch.arange(num_tokens), torch.arange(num_tokens))
    if not notes.layers:
        raise Unsuited(NOT_BY_INTERFACE)
    if len(notes.sizes) > 1:
        found = ", ".join(f"{heads}/{kv_heads}/{width}" for heads, kv_heads, width in sorted(notes.sizes))
        raise Unsuited(f"its layers differ in size (heads/KV heads/width: {found}), and the KV pool has one for all")
    [(num_heads, num_kv_heads, head_dim)] = notes.sizes
    return AttentionShape(num_heads, num_kv_heads, head_dim, tuple(notes.layers))


@dataclass(eq=False)
class _Notes:
    """Attention that gives zeros, and masks that hold nothing but their own numbers."""

    max_positions: int
    windows: list[int | None] = field(default_factory=list)  # of the masks that the model asked for
    sizes: set[tuple[int, int, int]] = field(default_factory=set)
    layers: list[AttentionSpec] = field(default_factory=list)

    def make_mask(self, *, kv_length: int, mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
        self.windows.append(_window(mask_function, min(self.max_positions, _FARTHEST)))
        return torch.full((1, 1, kv_length, kv_length), len(self.windows) - 1)

    def attend(self, call: AttentionCall) -> Tensor:
        self._check(call)
        (_, num_heads, num_tokens, head_dim), num_kv_heads = call.query.shape, call.key.shape[1]
        self.sizes.add((num_heads, num_kv_heads, head_dim))
        scale, soft_cap = call.arguments.get("scaling"), call.arguments.get("softcap")
        self.layers.append(
            AttentionSpec(
                scale=head_dim**-0.5 if scale is None else float(scale),
                window=self._window_of(call),
                soft_cap=None if soft_cap is None else float(soft_cap),
                rotation=None,  # it has been done
            )
        )
        return call.query.new_zeros(num_tokens, num_heads * head_dim)

    @staticmethod
    def _check(call: AttentionCall) -> None:
        for name, what in _MISSING.items():
            if call.arguments.get(name) is not None:
                raise Unsuited(f"it needs {what} ({name})")
        if call.arguments.get("is_causal") is False:
            raise Unsuited("its tokens see those behind them (is_causal is false)")
        q, k, v = (tuple(part.shape) for part in (call.query, call.key, call.value))
        if not len(q) == len(k) == len(v) == 4 or q[0] != 1 or q[2] != k[2]:
            raise Unsuited(f"its layers attend over other things than their own tokens: query {q}, key {k}")
        if k != v or q[3] != k[3]:
            raise Unsuited(f"its keys have width {k[3]} and its values {v[3]}, and the KV pool has one for both")
        if q[1] % k[1]:
            raise Unsuited(f"its {k[1]} KV heads do not divide its {q[1]} heads")

    def _window_of(self, call: AttentionCall) -> int | None:
        if call.mask is None:  # then it leaves the mask to attention, which is causal, and names the window
            window = call.arguments.get("sliding_window")
            return None if window is None or window >= self.max_positions else int(window)
        number = call.mask.flatten()[0]
        if call.mask.dtype != torch.int64 or not bool((call.mask == number).all()):
            raise Unsuited("it makes attention masks of its own, such as for ALiBi")
        return self.windows[int(number)]


def _window(mask_function: Callable[..., Tensor], max_positions: int) -> int | None:
    """The window of a mask, None for a plain causal one, by trying it at some places. Raises Unsuited for others."""
    keys = torch.arange(max_positions)
    zero = torch.zeros((), dtype=torch.int64)

    def visible(position: int) -> Tensor:
        return mask_function(zero, zero, torch.tensor(position), keys).expand(max_positions)

    window = int(visible(max_positions - 1).sum())
    for position in sorted({0, 1, max_positions // 3, max_positions // 2, max_positions - 1}):
        expected = (keys <= position) & (keys > position - window)
        if not torch.equal(visible(position), expected):
            raise Unsuited("its attention is neither causal over the whole text nor over a sliding window")
    return None if window >= max_positions else window


def dense_attend(shape: AttentionShape, owners: Tensor, positions: Tensor) -> Attend:
    """Attention of tokens in any order over those of their owner, as plainly as can be: owners [T], positions [T]."""
    distance = positions[:, None] - positions
    is_past = (owners[:, None] == owners) & (distance >= 0)  # [T, T]
    group = shape.num_heads // shape.num_kv_heads

    def attend(layer: int, qkv: Tensor) -> Tensor:
        spec = shape.layers[layer]
        heads = qkv.float().view(len(qkv), -1, shape.head_dim).transpose(0, 1)
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        q, k, v = torch.split(heads, sizes)  # [heads, T, head_dim] each
        scores = spec.scale * q @ k.repeat_interleave(group, 0).mT  # [num_heads, T, T]
        if spec.soft_cap is not None:
            scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
        visible = is_past if spec.window is None else is_past & (distance < spec.window)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out: Tensor = weights @ v.repeat_interleave(group, 0)
        return out.transpose(0, 1).flatten(1).to(qkv.dtype)

    return attend


def check_logits(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Logits [T, vocab_size] of ours and of transformers. Raises Unsuited where they are not the same model's."""
    errors = (found - expected).abs().amax(-1) / expected.abs().amax().clamp_min(1e-6)  # [T]
    # In a narrow type a rounding may send a token to another expert; what is wrong on principle moves most of them.
    error = float(errors.max() if dtype == torch.float32 else errors.median())
    if not error <= _TOLERANCE.get(dtype, _NARROW_TOLERANCE):
        raise Unsuited(
            "two short texts in one batch do not get the logits that transformers computes for each by itself (off by "
            f"{error:.2g} of the largest): something beside attention mixes tokens, or positions are not those that it "
            "is given"
        )
