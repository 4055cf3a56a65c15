"""The arithmetic of `benchmarks/profile_workloads.py`; its figures are measured, not tested."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from benchmarks.peers.workloads import WORKLOADS
from benchmarks.profile_workloads import PARTS, Phase, Rates, Step, Timers, Work, attributes, scaled, table


def test_time_counts_for_the_innermost_part() -> None:
    clock = count()  # a nanosecond between two looks at it
    timers = Timers(lambda: next(clock))
    inner = timers.around("inner", lambda: "value")

    def outer() -> str:
        return inner() + inner()

    assert timers.around("outer", outer)() == "valuevalue"
    spent, calls = timers.take()
    assert spent == {"outer": 3, "inner": 2}  # before, between and after the two
    assert calls == 3
    assert timers.take() == ({}, 0)


def test_a_part_that_raises_is_closed() -> None:
    clock = count()
    timers = Timers(lambda: next(clock))
    with pytest.raises(ZeroDivisionError):
        timers.around("bad", lambda: 1 / 0)()
    timers.around("good", int)()
    assert timers.take()[0] == {"bad": 1, "good": 1}


def test_attributes_come_back() -> None:
    class Owner:
        name = "class"

    owner = Owner()
    module = SimpleNamespace(function="own")
    with attributes([(owner, "name", "a"), (owner, "name", "b"), (module, "function", None)]):
        assert (owner.name, module.function) == ("b", None)
    assert (vars(owner), owner.name, module.function) == ({}, "class", "own")


def test_the_floor_is_the_larger_of_two() -> None:
    rates = Rates(bytes_per_s=100.0, flops_per_s=1000.0)
    assert rates.floor_s(50, 100) == 0.5
    assert rates.floor_s(5, 1000) == 1.0


def step(linear: float, attention: float, work: Work, *, is_prefill: bool = False) -> Step:
    seconds = dict.fromkeys(PARTS, 0.0) | {"linear": linear, "attention": attention, "scheduling": 0.001}
    return Step(is_prefill, seconds, calls=10, work=work)


def test_a_phase_is_the_mean_of_its_steps_and_of_their_floors() -> None:
    rates = Rates(bytes_per_s=1e6, flops_per_s=1e9)
    steps = [
        step(0.010, 0.002, Work(5_000, 1_000_000, 1_000, 10)),
        step(0.020, 0.006, Work(1_000, 9_000_000, 3_000, 10)),
    ]
    phase = Phase.of(steps, rates, timer_ns=100.0)
    assert phase is not None
    assert phase.ms["linear"] == pytest.approx(15.0)
    # Bytes bind in the first step, operations in the second: the floor is taken step by step.
    assert phase.floor_ms == pytest.approx({"linear": (5.0 + 9.0) / 2, "attention": 2.0})
    assert phase.timers_ms == pytest.approx(0.001)
    assert phase.step_ms == pytest.approx(20.0)
    assert phase.share("scheduling", "books") == pytest.approx(0.05)
    assert Phase.of([], rates, 100.0) is None


def test_the_table_adds_up() -> None:
    phase = Phase.of([step(0.010, 0.002, Work(5_000, 0, 1_000, 0))], Rates(1e6, 1e9), 100.0)
    lines = table({"prefill": None, "decode": phase})
    assert lines[0].startswith("| part | decode ms (1 steps) |")
    assert "| linear | 10.000 | 76.9% | 5.000 | 2.00 |" in lines
    assert lines[-1] == "| **step** | 13.000 | 100% | 6.000 | 2.17 |"
    assert len(lines) == len(PARTS) + 3


def test_shorter_workloads_keep_their_requests() -> None:
    assert scaled(WORKLOADS["W1"], 1.0) == (256, 128)
    assert scaled(WORKLOADS["W1"], 0.1) == (26, 13)
    assert scaled(WORKLOADS["W4"], 0.1) == (410, 1)
