"""Time as an argument: whoever needs to know the time is given a `Clock`, so that tests and simulations can turn it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds. Only differences mean anything."""

    def now(self) -> float:
        """Seconds since some fixed start; never goes back."""
        ...


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is turned."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Turn the clock forward by `seconds >= 0`."""
        assert seconds >= 0, "a clock never goes back"
        self._now += seconds
