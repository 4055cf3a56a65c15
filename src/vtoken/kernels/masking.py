"""Rule out tokens by bitmask, compiled: the Python face of `csrc/masking.cpp`."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.kernels.library import library


@cache
def _entry() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    function = library().vtoken_mask_logits
    function.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int32]
    function.restype = None
    return function


def mask_logits(logits: Tensor, rows: NDArray[np.int64], words: NDArray[np.uint32]) -> None:
    """In place: -inf where bit `i % 32` of `words[k, i // 32]` is not set, for token `i` of row `rows[k]` of `logits`
    [N, vocab_size] float32. Tokens beyond the words have no bit."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert words.dtype == np.uint32
    assert len(words) == len(rows)
    num_rows, vocab_size = logits.shape
    if len(rows) and not (rows.min() >= 0 and rows.max() < num_rows):
        raise IndexError(f"rows from {rows.min()} to {rows.max()} are not all within [0, {num_rows})")
    rows, words = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(words)
    _entry()(
        logits.data_ptr(),
        vocab_size,
        rows.ctypes.data,
        len(rows),
        words.ctypes.data,
        words.shape[1],
        torch.get_num_threads(),
    )
