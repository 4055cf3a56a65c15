"""The compiled kernels as one loaded library; the modules beside this one give its functions Python faces."""

from __future__ import annotations

import ctypes
from functools import cache

from vtoken.kernels.compiler import KernelsUnavailable, build


@cache
def library(isa: str = "native") -> ctypes.CDLL:
    """The library for this machine, compiled if need be. Calls into it release the GIL.

    Raises KernelsUnavailable, with a reason of one line, on a machine that cannot have it.
    """
    path = build(isa)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
