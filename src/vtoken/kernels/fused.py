"""The small operations between matrix products, compiled. Float32 tensors on the CPU."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vtoken.kernels.library import library
from vtoken.kernels.tape import launch


class _NormArgs(Structure):
    """`NormArgs` of fused.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("residual", "x", "weight", "out")),
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


class _GateArgs(Structure):
    """`GateArgs` of fused.cpp."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("num_threads", c_int32),
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


@cache
def _functions() -> tuple[Any, Any, Any, Any]:
    functions = library()
    found = (
        functions.vtoken_add_rms_norm,
        functions.vtoken_silu_and_mul,
        functions.vtoken_rotate_and_write,
        functions.vtoken_norm_heads,
    )
    for function, args in zip(found, (_NormArgs, _GateArgs, _WriteArgs, _HeadNormArgs), strict=True):
        function.argtypes, function.restype = [POINTER(args)], c_int64
    return found


def add_rms_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`residual += x`, in place; returns `residual / rms(residual) * weight`. Both [T, width]."""
    assert residual.is_contiguous()
    assert x is None or (x.is_contiguous() and x.shape == residual.shape)
    out = torch.empty_like(residual)
    rows, width = residual.shape
    args = _NormArgs(
        residual.data_ptr(),
        None if x is None else x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        eps,
        torch.get_num_threads(),
    )
    launch(_functions()[0], args, residual, x, weight, out)
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
    launch(_functions()[3], args, qkv, q_weight, k_weight)
    return qkv


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`: gate_up [T, 2 * width], the gate first -> [T, width]."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    args = _GateArgs(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, torch.get_num_threads())
    launch(_functions()[1], args, gate_up, out)
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
    launch(_functions()[2], args, qkv, cos, sin, slots)
