"""V24: the phases plan, copy, switch-and-return are visible in the event log (the dashboard draws it)."""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.eviction_log import phases_of, shrinking_driver
from vtoken.memory.copy import CopyKind


@pytest.mark.parametrize("beside_delay", [None, 0, 3])
def test_each_copy_and_each_block_that_returned_stand_in_it(beside_delay: int | None) -> None:
    driver = shrinking_driver("h2o", 20, [60, 50, 7, 33], beside_delay=beside_delay).run()
    log, counters = driver.memory.decisions, driver.memory.counters
    events = log.events
    assert {event.phase for event in events} >= {"plan", "copy", "return"}
    assert [event.step for event in events] == sorted(event.step for event in events)
    assert sum(event.tokens for event in events if event.phase == "copy") == counters.tokens_relocated
    assert sum(event.blocks for event in events if event.phase == "return") == counters.blocks_reclaimed
    assert sum(event.phase == "plan" for event in events) == len(log) == log.num_decisions
    for decision in log:
        plan, *rest = phases_of(driver)[decision.number]
        assert (plan.phase, plan.step, plan.tokens) == ("plan", decision.step, decision.tokens_copied)
        assert plan.blocks == decision.blocks_returned
        if beside_delay is None:  # all of it belongs to one step
            assert {event.step for event in rest} <= {decision.step}
            assert [phase for phase, _ in groupby(event.phase for event in rest)] in (
                [],
                ["return"],
                ["copy", "return"],
            )
            assert sum(event.blocks for event in rest) == decision.blocks_returned


def test_a_decision_is_stamped_with_the_step_whose_plan_carries_its_copies() -> None:
    driver = shrinking_driver("h2o", 20, [60, 50, 7, 33], keep_plans=True).run()
    in_plans = {plan.step for plan in driver.plans if any(copy.kind is CopyKind.RELOCATE for copy in plan.copies)}
    assert in_plans
    assert {event.step for event in driver.memory.decisions.events if event.phase == "copy"} == in_plans


def test_a_copy_whose_sequence_has_gone_is_dropped() -> None:
    driver = shrinking_driver("h2o", 20, [60, 50, 7, 33], beside_delay=6)
    log = driver.memory.decisions
    driver.run_until(lambda: any(event.phase == "copy" for event in log.events))
    copied = next(event for event in log.events if event.phase == "copy")
    [request] = [request for request in driver.requests if copied.lane in request.lanes]
    driver.scheduler.abort(request.request_id)
    driver.run()
    ends = [event for event in phases_of(driver)[copied.decision] if event.lane == copied.lane]
    assert [event.phase for event in ends] == ["copy", "drop"]
    assert ends[1].blocks == 0
