"""Paged attention, compiled: the Python face of `csrc/attention.h`."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

from torch import Tensor

from vtoken.kernels.library import library
from vtoken.kernels.tape import launch


class TallyArgs(ctypes.Structure):
    """`Tally` of `csrc/attention.h`."""

    _fields_ = (
        ("values", c_void_p),
        ("stride", c_int64),
        ("first", c_void_p),
        ("counts_low", c_int32),
    )


class AttendArgs(ctypes.Structure):
    """`AttendArgs` of `csrc/attention.h`, field by field; what each means is said there.

    Pointers are plain addresses: whoever fills them in keeps the memory alive and its layout as stated.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k_new", "v_new", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, c_int32) for name in ("key_format", "value_format", "num_heads", "num_kv_heads", "head_dim")),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        *((name, c_void_p) for name in ("starts", "positions", "tables", "masks", "past_live")),
        *((name, c_void_p) for name in ("row_positions", "write_rows", "tallies")),
        *((name, c_int32) for name in ("num_tallies", "num_slices", "num_entries", "block_size", "num_threads")),
        ("slots_read", c_int64),
    )

    def take_plan(self, other: AttendArgs) -> None:
        """Set all that concerns the plan as in `other`."""
        begin = AttendArgs.starts.offset
        size = ctypes.sizeof(AttendArgs) - begin
        ctypes.memmove(ctypes.addressof(self) + begin, ctypes.addressof(other) + begin, size)


@cache
def _entry(isa: str) -> Any:
    function = library(isa).vtoken_attend
    function.argtypes = [ctypes.POINTER(AttendArgs)]
    function.restype = c_int64
    return function


def attend(args: AttendArgs, *alive: Tensor, isa: str = "native") -> None:
    """Fill `args.out`, add to `args.tallies`, and set `args.slots_read`; see `launch` for `alive`.

    Raises KernelsUnavailable on a machine that cannot have them, MemoryError when scratch memory cannot be had.
    """
    missing = launch(_entry(isa), args, *alive)
    if missing:
        raise MemoryError(f"attention needs {missing} bytes of scratch memory, which the system refuses")
