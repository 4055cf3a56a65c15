from __future__ import annotations

import pytest

from vtoken.base.clock import Clock, ManualClock, MonotonicClock


def test_a_manual_clock_moves_only_when_it_is_turned() -> None:
    clock = ManualClock(5.0)
    assert (clock.now(), clock.now()) == (5.0, 5.0)
    clock.advance(0.25)
    assert clock.now() == 5.25
    with pytest.raises(AssertionError):
        clock.advance(-1)


def test_the_machines_clock_never_goes_back() -> None:
    clock: Clock = MonotonicClock()
    first = clock.now()
    assert clock.now() >= first
