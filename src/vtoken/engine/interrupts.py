"""Ctrl-C is honoured between two steps, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class HeldInterrupt:
    """`with HeldInterrupt():` lets the block finish before KeyboardInterrupt is raised; a second Ctrl-C does not wait.

    Python can raise KeyboardInterrupt between any two instructions, also half-way through a change of the books. Only
    the main thread gets signals, so elsewhere this does nothing.
    """

    def __enter__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._handler = signal.getsignal(signal.SIGINT)
        self._is_held = callable(self._handler) and threading.current_thread() is threading.main_thread()
        if self._is_held:
            signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None and callable(self._handler):
            self._handler(number, frame)
        self._came = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_held:
            signal.signal(signal.SIGINT, self._handler)
        if self._came is not None and callable(self._handler):
            self._handler(*self._came)
