"""Linear layers on packed weights, compiled: the Python face of `csrc/linear.h`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from functools import cache
from typing import Final

import torch
from torch import Tensor

from vtoken.kernels import arena
from vtoken.kernels.library import library
from vtoken.kernels.tape import launch

HOLDINGS: Final = {"f32": 0, "f16": 1, "bf16": 2, "g8": 3, "g4": 4, "int8": 5}
GROUP: Final = 32  # weights along `in` that share a scale in g8, g4 and int8


class _LinearArgs(Structure):
    """`LinearArgs` of linear.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "packed", "bias", "out")),
        *((name, c_int64) for name in ("num_rows", "in_features", "out_features", "x_stride", "out_stride")),
        *((name, c_int32) for name in ("holding", "num_threads", "accumulate")),
        ("scratch", c_void_p),
    ]


@cache
def _functions(isa: str) -> ctypes.CDLL:
    functions = library(isa)
    functions.vtoken_linear.argtypes = [POINTER(_LinearArgs)]
    functions.vtoken_linear.restype = c_int64
    functions.vtoken_linear_exact.argtypes = [c_void_p, c_int64, c_int64, c_int32]
    functions.vtoken_linear_exact.restype = c_int32
    functions.vtoken_linear_bytes.argtypes = [c_int32, c_int64, c_int64]
    functions.vtoken_linear_bytes.restype = c_int64
    functions.vtoken_linear_pack.argtypes = [c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32]
    functions.vtoken_linear_pack.restype = c_int64
    functions.vtoken_linear_rows.argtypes = [c_void_p, c_int64, c_int32, c_void_p, c_int64, c_void_p, c_int32]
    functions.vtoken_linear_rows.restype = None
    return functions


def exact_holdings(weight: Tensor, isa: str = "native") -> frozenset[str]:
    """Names of `HOLDINGS` that give every number of a float32 weight [out, in] back."""
    assert weight.is_contiguous()
    assert weight.dtype == torch.float32
    out_features, in_features = weight.shape
    found = _functions(isa).vtoken_linear_exact(weight.data_ptr(), out_features, in_features, torch.get_num_threads())
    return frozenset(name for name, number in HOLDINGS.items() if found >> number & 1)


class PackedWeight:
    """A weight [out, in] packed in one of `HOLDINGS`."""

    def __init__(self, weight: Tensor, holding: str, isa: str = "native") -> None:
        """Raises ValueError where g8 or g4 cannot keep the numbers, or int8 not hold them."""
        assert weight.dtype == torch.float32
        self.out_features, self.in_features = weight.shape
        if holding in ("g8", "g4") and self.in_features % GROUP:
            raise ValueError(f"{holding} takes groups of {GROUP} weights, and {self.in_features} is no multiple of it")
        self._functions = _functions(isa)
        self._multiply = self._functions.vtoken_linear
        self._holding = HOLDINGS[holding]
        self.nbytes = self._functions.vtoken_linear_bytes(self._holding, self.out_features, self.in_features)
        self._packed = arena.allocate(self.nbytes)
        self._address = self._packed.data_ptr()
        # Bytes a row: the activations as codes, with a scale and a sum for each group.
        self._scratch = -(-self.in_features // GROUP) * (GROUP + 8) if holding == "int8" else 0
        weight = weight.contiguous()
        failed = self._functions.vtoken_linear_pack(
            weight.data_ptr(),
            self.out_features,
            self.in_features,
            self._holding,
            self._address,
            torch.get_num_threads(),
        )
        if failed:
            raise ValueError(f"{failed} groups of {GROUP} weights are not what {holding} can hold")

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, in] @ weight.T + bias [out] -> [T, out], float32; added to `out` where that is given."""
        num_rows, in_features = x.shape
        assert in_features == self.in_features
        assert x.dtype is torch.float32
        x_stride, step = x.stride()
        if step != 1:
            x = x.contiguous()
            x_stride = in_features
        accumulate = out is not None
        if out is None:
            out = torch.empty(num_rows, self.out_features)
            out_stride = self.out_features
        else:
            out_stride, step = out.stride()
            assert out.shape == (num_rows, self.out_features)
            assert (step, out.dtype) == (1, torch.float32)
        scratch = torch.empty(num_rows * self._scratch, dtype=torch.uint8) if self._scratch else None
        # New for each call: a tape may keep it, and threads may share a weight.
        args = _LinearArgs(
            x.data_ptr(),
            self._address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_rows,
            in_features,
            self.out_features,
            x_stride,
            out_stride,
            self._holding,
            torch.get_num_threads(),
            accumulate,
            None if scratch is None else scratch.data_ptr(),
        )
        launch(self._multiply, args, x, bias, out, scratch)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [T] (int64, within range) of the weight -> [T, in]."""
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], self.in_features)
        self._functions.vtoken_linear_rows(
            self._address,
            self.in_features,
            self._holding,
            ids.data_ptr(),
            ids.shape[0],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
