"""Draw tokens, compiled: the Python face of `csrc/sampling.cpp`."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.kernels.library import library


class RowStatus(IntEnum):
    """What a row of logits is like. Only from the first can a token be drawn."""

    FINE = 0
    NAN = 1
    INFINITE = 2
    RULED_OUT = 3  # every logit is -inf


@cache
def _entry() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    function = library().vtoken_sample
    function.argtypes = [c_void_p, c_int64, c_int64, *[c_void_p] * 8, c_int32]
    function.restype = None
    return function


def sample_rows(
    logits: Tensor,  # [N, vocab_size] float32
    greedy: NDArray[np.bool_],  # [N]
    temperature: NDArray[np.float32],  # [N]
    min_p: NDArray[np.float32],  # [N]
    top_p: NDArray[np.float32],  # [N]
    top_k: NDArray[np.int32],  # [N]
    uniforms: NDArray[np.float64],  # [N]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """tokens [N], -1 where none can be drawn, and the `RowStatus` of each row [N]."""
    logits = logits.contiguous()
    assert logits.dtype == torch.float32
    columns = [
        np.ascontiguousarray(column, dtype=dtype)
        for column, dtype in (
            (greedy, np.uint8),
            (temperature, np.float32),
            (min_p, np.float32),
            (top_p, np.float32),
            (top_k, np.int32),
            (uniforms, np.float64),
        )
    ]
    num_rows, vocab_size = logits.shape
    assert all(len(column) == num_rows for column in columns)
    tokens, statuses = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    pointers = [array.ctypes.data for array in (*columns, tokens, statuses)]
    _entry()(logits.data_ptr(), num_rows, vocab_size, *pointers, torch.get_num_threads())
    return tokens, statuses
