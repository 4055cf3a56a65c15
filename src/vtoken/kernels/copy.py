"""Move cells of the KV cache, compiled. Every tensor is indexed [block, head, offset] and contiguous."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vtoken.kernels.library import library


@cache
def _functions() -> ctypes.CDLL:
    functions = library()
    pointer = c_void_p
    functions.vtoken_copy_slots.argtypes = [
        pointer,
        pointer,
        c_int64,
        c_int64,
        c_int64,
        pointer,
        pointer,
        c_int64,
        c_int32,
    ]
    functions.vtoken_copy_blocks.argtypes = [pointer, pointer, pointer, c_int64, pointer, pointer, c_int64, c_int32]
    functions.vtoken_copy_slots.restype = functions.vtoken_copy_blocks.restype = None
    return functions


def copy_slots(tensors: Sequence[Tensor], src: NDArray[np.int64], dst: NDArray[np.int64], num_threads: int) -> None:
    """In every tensor, slot `src[i]` to slot `dst[i]`, one after the other."""
    num_blocks, num_heads, block_size = tensors[0].shape[:3]
    src, dst = _within(src, num_blocks * block_size), _within(dst, num_blocks * block_size)
    planes, cell_bytes = _addresses(tensors), _strides(tensors, 2)
    _functions().vtoken_copy_slots(
        planes.ctypes.data,
        cell_bytes.ctypes.data,
        len(tensors),
        num_heads,
        block_size,
        src.ctypes.data,
        dst.ctypes.data,
        len(src),
        num_threads,
    )


def copy_blocks(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    num_threads: int,
) -> None:
    """Block `src[i]` of every source to block `dst[i]` of the target beside it; the two share no memory."""
    src, dst = _within(src, len(sources[0])), _within(dst, len(targets[0]))
    read, write, block_bytes = _addresses(sources), _addresses(targets), _strides(sources, 0)
    _functions().vtoken_copy_blocks(
        read.ctypes.data,
        write.ctypes.data,
        block_bytes.ctypes.data,
        len(sources),
        src.ctypes.data,
        dst.ctypes.data,
        len(src),
        num_threads,
    )


def _within(ids: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The ids as the kernels take them. They write wherever they are told, so a wrong id is caught here."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < size):
        raise IndexError(f"ids from {ids.min()} to {ids.max()} are not all within [0, {size})")
    return np.ascontiguousarray(ids, dtype=np.int64)


def _addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def _strides(tensors: Sequence[Tensor], dim: int) -> NDArray[np.int64]:
    """Bytes from one index of `dim` to the next."""
    return np.array([tensor.stride(dim) * tensor.element_size() for tensor in tensors], dtype=np.int64)
