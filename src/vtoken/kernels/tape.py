"""`Tape`: a sequence of kernel calls, recorded once and made again in a single call.

A step of a lone sequence makes hundreds of calls of some microseconds each, and the way through Python costs as much
again. Its calls are the same in every step but for what they read. So they are recorded with their arguments, whose
tensors are kept, and a replay works on the same memory. New input is copied into the recorded tensors beforehand.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, byref, c_int64, c_void_p
from functools import cache
from typing import Any

from torch import Tensor

from vtoken.kernels.library import library

_local = threading.local()  # `tape`: the one that records this thread's calls


class _Call(Structure):
    """`Call` of replay.cpp."""

    _fields_ = (("function", c_void_p), ("args", c_void_p))


class Tape:
    """Kernel calls in their order, with everything they point to."""

    def __init__(self) -> None:
        self.args: list[Structure] = []
        """The arguments of each call. What is changed in them holds from the next replay on."""
        self._functions: list[Any] = []
        self._alive: list[tuple[Tensor | None, ...]] = []
        self._calls: ctypes.Array[_Call] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Calls that this thread makes in the block are recorded too. One tape at a time."""
        assert getattr(_local, "tape", None) is None, "another tape is recording"
        _local.tape = self
        try:
            yield
        finally:
            _local.tape = None

    def add(self, function: Any, args: Structure, alive: tuple[Tensor | None, ...]) -> None:
        self._functions.append(function)
        self.args.append(args)
        self._alive.append(alive)

    def replay(self) -> int:
        """Make all calls again. Returns what the first that failed returned, or 0."""
        if self._calls is None:
            addresses = [ctypes.cast(function, c_void_p).value for function in self._functions]
            pairs = zip(addresses, map(ctypes.addressof, self.args), strict=True)
            self._calls = (_Call * len(self.args))(*(_Call(*pair) for pair in pairs))
        return int(_entry()(self._calls, len(self._calls)))


def launch(function: Any, args: Structure, *alive: Tensor | None) -> int:
    """Call a kernel of the form `int64_t kernel(Args*)`; what it returned. The GIL is released meanwhile.

    `alive` are the tensors that the arguments point to, as far as nobody else keeps them for as long as the model.
    """
    tape = getattr(_local, "tape", None)
    if tape is not None:
        tape.add(function, args, alive)
    return int(function(byref(args)))


@cache
def _entry() -> Any:
    function = library().vtoken_replay
    function.argtypes = [c_void_p, c_int64]
    function.restype = c_int64
    return function
