"""The small operations between matrix products, compiled. Float32 tensors on the CPU."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from vtoken.kernels.library import library
from vtoken.kernels.tape import launch

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]
ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)
"""In the order of the codes in fused.cpp."""


class _NormArgs(Structure):
    """`NormArgs` of fused.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("residual", "x", "weight", "bias", "out")),
        ("rows", c_int64),
        ("width", c_int64),
        ("eps", c_float),
        ("num_threads", c_int32),
    )


class _HeadNormArgs(Structure):
    """`HeadNormArgs` of fused.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "q_weight", "k_weight")),
        *((name, c_int64) for name in ("num_tokens", "row_heads", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", c_float),
        ("num_threads", c_int32),
    )


class _ActivateArgs(Structure):
    """`ActivateArgs` of fused.cpp."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        *((name, c_int32) for name in ("activation", "is_gated", "num_threads")),
    )


class _WriteArgs(Structure):
    """`WriteArgs` of fused.cpp."""

    _fields_ = (
        ("qkv", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotary_dim", c_int64),
        *((name, c_void_p) for name in ("slots", "keys", "values", "key_scales", "value_scales")),
        *((name, c_int32) for name in ("key_format", "value_format", "num_threads")),
    )


_SIGNATURES: Final[dict[str, type[Structure]]] = {
    "vtoken_add_rms_norm": _NormArgs,
    "vtoken_add_layer_norm": _NormArgs,
    "vtoken_norm_heads": _HeadNormArgs,
    "vtoken_activate": _ActivateArgs,
    "vtoken_rotate_and_write": _WriteArgs,
}


@cache
def _function(name: str) -> Any:
    function = getattr(library(), name)
    function.argtypes, function.restype = [POINTER(_SIGNATURES[name])], c_int64
    return function


def add_rms_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`residual += x`, in place; returns `residual / rms(residual) * weight`. Both [T, width]."""
    return _add_norm("vtoken_add_rms_norm", residual, x, weight, None, eps)


def add_layer_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`residual += x`, in place; returns the layer norm of the sum, times `weight`, plus `bias`. Both [T, width]."""
    return _add_norm("vtoken_add_layer_norm", residual, x, weight, bias, eps)


def _add_norm(
    name: str, residual: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    assert residual.is_contiguous()
    assert x is None or (x.is_contiguous() and x.shape == residual.shape)
    out = torch.empty_like(residual)
    rows, width = residual.shape
    args = _NormArgs(
        residual.data_ptr(),
        None if x is None else x.data_ptr(),
        None if weight is None else weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        eps,
        torch.get_num_threads(),
    )
    launch(_function(name), args, residual, x, weight, bias, out)
    return out


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_kv_heads: int, eps: float) -> Tensor:
    """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] with each query and key normed, in place."""
    assert qkv.is_contiguous()
    num_tokens, width = qkv.shape
    head_dim = len(q_weight)
    row_heads = width // head_dim
    args = _HeadNormArgs(
        qkv.data_ptr(),
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        num_tokens,
        row_heads,
        row_heads - 2 * num_kv_heads,
        num_kv_heads,
        head_dim,
        eps,
        torch.get_num_threads(),
    )
    launch(_function("vtoken_norm_heads"), args, qkv, q_weight, k_weight)
    return qkv


def activate(x: Tensor, activation: Activation) -> Tensor:
    """x [T, width], changed in place, and returned."""
    return _activate(x, x, activation, is_gated=False)


def activate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """`f(gate) * up`: gate_up [T, 2 * width], the gate first -> [T, width]."""
    rows, width = gate_up.shape
    return _activate(gate_up, gate_up.new_empty(rows, width // 2), activation, is_gated=True)


def _activate(x: Tensor, out: Tensor, activation: Activation, is_gated: bool) -> Tensor:
    assert x.is_contiguous()
    args = _ActivateArgs(
        x.data_ptr(),
        out.data_ptr(),
        len(out),
        out.shape[1],
        ACTIVATIONS.index(activation),
        is_gated,
        torch.get_num_threads(),
    )
    launch(_function("vtoken_activate"), args, x, out)
    return out


def rotate_and_write(
    qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    rotation: tuple[Tensor, Tensor] | None,  # cos, sin [T, rotary_dim / 2]
    slots: Tensor,  # [T] int64
    layout: tuple[int, int, int],  # num_kv_heads, block_size, head_dim of the cache
    keys: tuple[int, int | None, int],  # addresses of cells and scales, code of the format
    values: tuple[int, int | None, int],
) -> None:
    """Turn the queries and keys of `qkv` in place, store its keys and values in their slots, and leave them in `qkv` as
    the cache holds them."""
    num_kv_heads, block_size, head_dim = layout
    assert qkv.is_contiguous()
    assert slots.is_contiguous()
    num_tokens, width = qkv.shape
    cos, sin = rotation or (None, None)
    assert cos is None or (cos.is_contiguous() and sin is not None and sin.is_contiguous())
    args = _WriteArgs(
        qkv.data_ptr(),
        num_tokens,
        width // head_dim - 2 * num_kv_heads,
        num_kv_heads,
        head_dim,
        block_size,
        None if cos is None else cos.data_ptr(),
        None if sin is None else sin.data_ptr(),
        0 if cos is None else 2 * cos.shape[1],
        slots.data_ptr(),
        keys[0],
        values[0],
        keys[1],
        values[1],
        keys[2],
        values[2],
        torch.get_num_threads(),
    )
    launch(_function("vtoken_rotate_and_write"), args, qkv, cos, sin, slots)
