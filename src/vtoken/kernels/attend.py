"""Paged attention, compiled: the Python face of `csrc/attention.h`."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

from vtoken.kernels.library import library


class AttendArgs(ctypes.Structure):
    """`AttendArgs` of `csrc/attention.h`, field by field; what each means is said there.

    Pointers are plain addresses: whoever fills them in keeps the memory alive and its layout as stated.
    """

    _fields_ = (
        ("q", c_void_p),
        ("k_new", c_void_p),
        ("v_new", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("key_format", c_int32),
        ("value_format", c_int32),
        ("num_slices", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("num_entries", c_int32),
        ("starts", c_void_p),
        ("positions", c_void_p),
        ("tables", c_void_p),
        ("masks", c_void_p),
        ("past_live", c_void_p),
        ("row_positions", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("mass", c_void_p),
        ("mass_stride", c_int64),
        ("write_rows", c_void_p),
        ("num_threads", c_int32),
        ("slots_read", c_int64),
    )


@cache
def _entry(isa: str) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    function = library(isa).vtoken_attend
    function.argtypes = [ctypes.POINTER(AttendArgs)]
    function.restype = c_int64
    return function


def attend(args: AttendArgs, isa: str = "native") -> None:
    """Fill `args.out`, add to `args.mass` where that is set, and set `args.slots_read`. Releases the GIL.

    Raises KernelsUnavailable on a machine that cannot have them, MemoryError when scratch memory cannot be had.
    """
    missing = _entry(isa)(ctypes.byref(args))
    if missing:
        raise MemoryError(f"attention needs {missing} bytes of scratch memory, which the system refuses")
