"""The decision log: bounded, stamped, and with counts that only grow."""

from __future__ import annotations

import pytest

from vtoken.memory.decisions import DecisionLog, ReclaimDecision, Verdict


def decision(step: int, verdict: Verdict = "no_gain") -> ReclaimDecision:
    return ReclaimDecision(step, step, "test", 1, None, 0, 0, 0, 0, verdict)


def test_only_the_latest_are_kept_and_all_are_counted() -> None:
    log = DecisionLog(capacity=3)
    assert (len(log), log.latest) == (0, None)
    for step in range(5):
        log.add(decision(step, "packed" if step % 2 else "no_gain"))
    assert [found.step for found in log] == [2, 3, 4]
    assert log.latest == decision(4)
    assert log.counts == {"packed": 2, "dead_blocks": 0, "no_gain": 3, "too_dear": 0}


def test_a_log_of_a_thousand_is_the_default() -> None:
    log = DecisionLog()
    for step in range(1001):
        log.add(decision(step))
    assert len(log) == 1000


def test_a_log_holds_something() -> None:
    with pytest.raises(ValueError, match="at least 1 decision, got 0"):
        DecisionLog(capacity=0)


def test_the_last_events_and_a_decision_by_its_number() -> None:
    log = DecisionLog(capacity=3)
    assert (log.last_events(5), log.find(0)) == ([], None)
    for step in range(5):
        log.step = step
        log.add(decision(step))
    assert log.num_events == 5
    assert [event.step for event in log.last_events(2)] == [3, 4]
    assert [event.step for event in log.last_events(99)] == [0, 1, 2, 3, 4]
    assert [log.find(number) for number in (1, 2, 4, 5, -1)] == [None, decision(2), decision(4), None, None]
