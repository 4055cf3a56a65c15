"""How the per-token operations of a decoder are computed: so that rows keep apart, or as fast as the machine can.

The reference execution owes every token the same bits whatever the batch is. BLAS does not give that: it picks its
kernel by the number of rows, so a row alone and the same row in a batch differ in the last bits. A product of one fixed
shape comes closer, but only if the rows fall evenly on the kernel and on the threads: with MKL's AVX2 code the last two
of 32 rows differ from the others, with its AVX-512 code none do. So the row count is chosen by trying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vtoken.kernels import fused
from vtoken.kernels.fused import Activation

# Best first: 48 is a multiple of 6, 8, 12, 16 and 24, the rows that BLAS kernels take at once, and costs a lone token
# hardly more than fewer would. A single row has no neighbours; it is the slow way out that is always right.
TILE_ROWS: Final = (48, 32, 24, 16, 8, 1)


@cache
def even_tile_rows(in_features: int, out_features: int, dtype: torch.dtype, has_bias: bool, num_threads: int) -> int:
    """The first of `TILE_ROWS` with which this machine treats all rows of a product alike.

    Tried with tiles of equal rows, whose results must be equal. `num_threads` is what torch uses: BLAS shares the rows
    out among threads. Takes as much memory as the weight, for a moment.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weight = (random(out_features, 1) * random(in_features)).to(dtype)
    bias = random(out_features).to(dtype) if has_bias else None
    # Many rows where they are short, since a few numbers may come out equal by luck.
    samples = random(2 + 512 // out_features, in_features).to(dtype)

    def is_even(num_rows: int) -> bool:
        results = (F.linear(row.expand(num_rows, -1).contiguous(), weight, bias) for row in samples)
        return all(torch.equal(result, result[:1].expand_as(result)) for result in results)

    return next(num_rows for num_rows in TILE_ROWS if num_rows == 1 or is_even(num_rows))


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in zero-padded tiles of one row count: x [T, in], weight [out, in], bias [out] -> [T, out].

    Each tile lies in a fresh buffer, because a view into `x` may be aligned differently and BLAS may care.
    """
    num_rows, width = x.shape
    tile_rows = even_tile_rows(width, len(weight), x.dtype, bias is not None, torch.get_num_threads())
    out = x.new_empty(num_rows, len(weight))
    for start in range(0, num_rows, tile_rows):
        rows = x[start : start + tile_rows]
        tile = x.new_zeros(tile_rows, width)
        tile[: len(rows)] = rows
        out[start : start + tile_rows] = F.linear(tile, weight, bias)[: len(rows)]
    return out


_ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}


def rowwise_activate(x: Tensor, activation: Activation) -> Tensor:
    """x [T, width], changed in place, and returned.

    Row by row: torch computes the elements behind the last full SIMD vector of a tensor, or of a thread's share of it,
    by another exp than the rest, so in one call a row's bits would depend on where it lies.
    """
    for row in range(len(x)):
        x[row] = _ACTIVATIONS[activation](x[row])
    return x


def rowwise_activate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """`f(gate) * up`: gate_up [T, 2 * width], the gate first -> [T, width]. Row by row, see `rowwise_activate`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return rowwise_activate(gate.contiguous(), activation).mul_(up)


def add_rms_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`residual += x`, in place; returns `residual / rms(residual) * weight`. Both [T, width].

    A weight in the dtype of the residual multiplies what was rounded to it, as in Llama; a float32 weight multiplies
    before, as in Gemma. Sums over the last dimension of a contiguous tensor are taken row by row, and the rest is
    exactly rounded: no row depends on another.
    """
    if x is not None:
        residual += x
    return _rms_norm(residual, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.float()
    mean_square = exact.pow(2).mean(dim=-1, keepdim=True)
    normed = exact * torch.rsqrt(mean_square + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_kv_heads: int, eps: float) -> Tensor:
    """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] with each query and key divided by its root mean square and
    multiplied by a weight [head_dim], in place. Heads are rows of their own, see `add_rms_norm`."""
    heads = qkv.view(len(qkv), qkv.shape[1] // len(q_weight), len(q_weight))
    queries, keys, _ = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    for part, weight in ((queries, q_weight), (keys, k_weight)):
        part.copy_(_rms_norm(part.contiguous(), weight, eps))
    return qkv


def add_layer_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`residual += x`, in place; returns `(residual - mean) / std * weight + bias`. Both [T, width]; see above."""
    if x is not None:
        residual += x
    exact = residual.float()
    centred = exact - exact.mean(dim=-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        normed *= weight
    if bias is not None:
        normed += bias
    return normed.to(residual.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`: x [T, width], changed in place, and returned. Row by row, see `rowwise_activate`."""
    for row in x:
        row.div_(cap).tanh_().mul_(cap)
    return x


@dataclass(frozen=True)
class Kernels:
    """How the per-token operations that cost time are computed. A faster set may trade bits for speed."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias; before `Linear.prepare`
    activate: Callable[[Tensor, Activation], Tensor]
    activate_and_mul: Callable[[Tensor, Activation], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    add_layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, float], Tensor]
    norm_heads: Callable[[Tensor, Tensor, Tensor, int, float], Tensor]


BATCH_INVARIANT = Kernels(
    tiled_linear, rowwise_activate, rowwise_activate_and_mul, add_rms_norm, add_layer_norm, norm_heads
)


def fast_activate(x: Tensor, activation: Activation) -> Tensor:
    """As `rowwise_activate`, compiled in float32 and torch's in other types."""
    return fused.activate(x, activation) if x.dtype == torch.float32 else _ACTIVATIONS[activation](x)


def fast_activate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """As `rowwise_activate_and_mul`, compiled in float32 and torch's in other types."""
    if gate_up.dtype == torch.float32:
        return fused.activate_and_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate).mul_(up)


def fast_add_rms_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`add_rms_norm`, compiled in float32 and torch's in other types."""
    if residual.dtype == torch.float32:
        return fused.add_rms_norm(residual, x, weight, eps)
    return add_rms_norm(residual, x, weight, eps)


def fast_add_layer_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`add_layer_norm`, compiled in float32 and torch's in other types."""
    if residual.dtype == torch.float32:
        return fused.add_layer_norm(residual, x, weight, bias, eps)
    return add_layer_norm(residual, x, weight, bias, eps)


def fast_norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_kv_heads: int, eps: float) -> Tensor:
    """`norm_heads`, compiled in float32 and torch's in other types."""
    norm = fused.norm_heads if qkv.dtype == torch.float32 else norm_heads
    return norm(qkv, q_weight, k_weight, num_kv_heads, eps)


COMPILED = Kernels(
    F.linear, fast_activate, fast_activate_and_mul, fast_add_rms_norm, fast_add_layer_norm, fast_norm_heads
)
