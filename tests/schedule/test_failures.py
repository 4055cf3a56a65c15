"""Steps and draws that fail: whoever is at fault ends with the error, and nobody else notices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.driving import DrawFailure, Driver, Fault, StepFailure, evict_every_other_prompt, tokens
from vtoken.base.errors import EngineError
from vtoken.schedule.batch import PlanBuilder
from vtoken.schedule.plan import StepPlan
from vtoken.schedule.sequence import FinishReason, Request, Status

AFTER = ["nothing", "copies", "forward"]


def breaks(*request_ids: str, from_output: int = 0, after: str = "nothing", draw: bool = False) -> Fault:
    """Every step with one of these requests fails once it has so many tokens of its answer."""

    def fault(plan: StepPlan, ran: list[Request]) -> StepFailure | DrawFailure | None:
        for request in ran:
            if request.request_id in request_ids and request.unfinished[0].num_output_tokens >= from_output:
                reason = f"{request.request_id} is broken"
                return DrawFailure(request, reason) if draw else StepFailure(reason, after)
        return None

    return fault


def busy(fault: Fault | None = None, **settings: object) -> Driver:
    driver = Driver(**{"num_blocks": 200, "block_size": 4, "max_num_batched_tokens": 48, "fault": fault, **settings})
    common = tokens(10, 99)
    for i in range(8):
        driver.add(common + tokens(3 + 4 * i, i), 6 + i, n=1 + (i == 4), temperature=float(i % 2))
    return driver


def reasons(driver: Driver) -> dict[str, FinishReason]:
    return {request.request_id: request.sequences[-1].finish_reason for request in driver.requests}


@pytest.mark.parametrize(
    ("culprits", "after"),
    [(("3",), "nothing"), (("0",), "copies"), (("7",), "forward"), (("4",), "copies"), (("1", "2", "6"), "forward")],
)
@pytest.mark.parametrize("from_output", [0, 3])
def test_those_at_fault_end_and_all_others_answer(culprits: tuple[str, ...], from_output: int, after: str) -> None:
    driver = busy(breaks(*culprits, from_output=from_output, after=after)).run()  # compares with the plain model
    for request in driver.requests:
        if request.request_id in culprits:
            assert request.sequences[0].finish_reason is FinishReason.ERROR
            assert request.error == f"StepFailure: {request.request_id} is broken"
            assert request.sequences[0].num_output_tokens == from_output
        else:
            assert request.sequences[0].finish_reason is FinishReason.LENGTH
            assert request.error is None
    assert driver.counters.finished[FinishReason.ERROR] == len(culprits)
    assert driver.counters.failed_steps >= len(culprits)


@pytest.mark.parametrize(("culprit", "from_output"), [("3", 0), ("4", 0), ("4", 3)])
def test_a_failed_draw_ends_its_request_only_and_costs_nobody_a_step(culprit: str, from_output: int) -> None:
    driver = busy(breaks(culprit, from_output=from_output, draw=True)).run()
    assert {r.request_id: r.error for r in driver.requests if r.error} == {culprit: f"{culprit} is broken"}
    assert driver.counters.failed_steps == driver.counters.preemptions == 0


def test_a_step_that_fails_once_ends_nobody_when_many_ran_in_it() -> None:
    for failing in range(0, 12, 2):
        driver = busy(lambda plan, ran, failing=failing: StepFailure() if plan.step == failing else None).run()
        assert set(reasons(driver).values()) == {FinishReason.LENGTH}
        assert driver.counters.failed_steps == 1


def test_when_every_step_fails_every_request_ends_with_the_error() -> None:
    driver = busy(lambda plan, ran: StepFailure("no device")).run(max_steps=60)
    assert {request.error for request in driver.requests} == {"StepFailure: no device"}


def test_suspects_run_alone_until_each_has_had_a_token() -> None:
    crowds: list[int] = []

    def fault(plan: StepPlan, ran: list[Request]) -> StepFailure | None:
        crowds.append(len(ran))
        return StepFailure() if plan.step == 3 else None

    driver = busy(fault).run()
    suspects = crowds[3]
    assert suspects > 2
    after = crowds[4:]
    alone = next(i for i, count in enumerate(after) if count > 1)
    assert alone >= suspects  # a step each at least, more for long prompts
    assert max(after[alone:]) > 2
    assert driver.counters.failed_steps == 1


def test_a_single_request_that_fails_ends_at_once() -> None:
    driver = Driver(fault=lambda plan, ran: StepFailure() if plan.step == 2 else None)
    request = driver.add(tokens(5, 1), 8)
    driver.run()
    assert request.error == "StepFailure: planted"
    assert request.sequences[0].num_output_tokens == 2
    assert driver.counters.steps == 3


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_any_step_may_fail_in_a_tight_pool(preemption: str, after: str) -> None:
    """Copies on write, swaps and relocations of the failed plan may or may not have run."""
    swaps = relocations = copies = 0
    for failing in range(AFTER.index(after), 50, 7):
        driver = Driver(
            num_blocks=35,
            block_size=4,
            num_host_blocks=35,
            preemption=preemption,
            enable_prefix_caching=failing % 2 == 0,
            max_num_batched_tokens=48,
            evictor=evict_every_other_prompt(),
            fault=lambda plan, ran, failing=failing: StepFailure(after=after) if plan.step == failing else None,
        )
        driver.add_crowd().run()
        assert sum(request.error is not None for request in driver.requests) <= 1  # one that was alone
        swaps += driver.counters.preemptions_swap
        relocations += driver.memory.counters.tokens_relocated
        copies += driver.memory.counters.tokens_copied_on_write
    assert relocations > 0
    assert copies > 0
    assert (swaps > 0) == (preemption == "swap")


def test_blocks_of_a_failed_step_are_not_matched_afterwards() -> None:
    driver = Driver(block_size=4, fault=lambda plan, ran: StepFailure() if plan.step == 0 else None)
    driver.add(tokens(16, 1), 4)
    driver.step()
    assert len(driver.memory.prefix) == 0
    again = driver.add(tokens(16, 1), 4)
    driver.run()
    assert again.num_cached_tokens == 0


def test_blocks_of_a_failed_draw_are_not_matched_afterwards() -> None:
    driver = Driver(block_size=4, fault=lambda plan, ran: DrawFailure(ran[0]) if plan.step == 3 else None)
    driver.add(tokens(16, 1), 8)
    for _ in range(4):
        driver.step()
    assert driver.scheduler.num_unfinished == 0
    assert len(driver.memory.prefix) == 0
    again = driver.add(tokens(16, 1), 4)
    driver.run()
    assert again.num_cached_tokens == 0


def test_a_suspect_waits_while_those_above_suspicion_hold_the_blocks() -> None:
    """To come back, a sequence that lost most of its prompt needs the whole of it once more, for a moment. The one
    that was cleared before it goes on meanwhile, and nobody hangs."""
    driver = Driver(
        num_blocks=11,
        block_size=4,
        enable_prefix_caching=False,
        fault=lambda plan, ran: StepFailure() if plan.step == 16 else None,
        evictor=lambda sequence, length: range(22) if length == 24 else (),
    )
    first = driver.add(tokens(4, 1), 24)
    for _ in range(10):
        driver.step()
    second = driver.add(tokens(24, 2), 12)
    for _ in range(7):
        driver.step()
    assert driver.counters.failed_steps == 1
    assert (first.status, second.status) == (Status.PREEMPTED, Status.PREEMPTED)
    driver.step()
    driver.step()
    assert (first.status, second.status) == (Status.RUNNING, Status.PREEMPTED)
    driver.run()
    assert first.error is second.error is None
    assert first.finish_time < second.finish_time


def test_an_abort_that_came_in_during_a_failed_step_holds() -> None:
    driver = busy(lambda plan, ran: StepFailure() if plan.step == 2 else None)
    driver.step()
    driver.step()
    driver.step(in_flight=lambda: [driver.scheduler.abort(request_id) for request_id in ("0", "7")])
    assert driver.requests[0].status is driver.requests[7].status is Status.FINISHED
    driver.run()
    assert [k for k, reason in reasons(driver).items() if reason is FinishReason.ABORT] == ["0", "7"]


def test_an_exception_while_a_step_is_planned_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens had their cells and its full blocks their prefix entries; none of it was ever computed."""
    driver = Driver(num_blocks=20, block_size=4, max_num_batched_tokens=64)
    driver.add(tokens(9, 1), 12)
    driver.step()
    driver.add(tokens(30, 2), 6, n=2)
    build = PlanBuilder.build

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanBuilder, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.scheduler.schedule()
    monkeypatch.setattr(PlanBuilder, "build", build)
    driver.scheduler.check()
    assert driver.memory.prefix.num_pending == 0
    driver.add(tokens(30, 2), 6)  # would match the entries that were never computed
    driver.run()


def test_a_sequence_swapped_out_where_it_was_to_lose_tokens_loses_them_when_it_is_back() -> None:
    """It was recomputed, stands at the length of a recorded death, and is swapped out before the death is replayed."""
    driver = Driver(
        num_blocks=24,
        block_size=4,
        num_host_blocks=24,
        preemption="swap",
        enable_prefix_caching=False,
        evictor=lambda sequence, length: range(2, 8) if length == 14 else (),
    )
    request = driver.add(tokens(12, 1), 12)
    for _ in range(3):
        driver.step()
    residents = driver.scheduler._residents
    residents.preempt(request, None)  # recompute
    while driver.memory.tokens.lengths[request.lanes].tolist() != [14]:
        driver.step()
    batch = PlanBuilder(driver.memory, driver.scheduler._state, 0)
    residents.preempt(request, batch)
    driver.sim._run_copies(replace(driver_plan(driver), copies=tuple(batch.copies)))
    assert request.status is Status.SWAPPED
    driver.run()


def driver_plan(driver: Driver) -> StepPlan:
    """An empty plan, to carry copies."""
    return PlanBuilder(driver.memory, driver.scheduler._state, 0).build(
        0, driver.scheduler._evictor, row_positions=False
    )


def test_a_result_that_cannot_be_this_steps_is_refused_before_it_is_entered() -> None:
    driver = Driver()
    driver.add(tokens(9, 1), 4)
    plan = driver.scheduler.schedule()
    assert plan is not None
    result = driver.sim.execute(plan)
    with pytest.raises(EngineError, match="draws 1 tokens"):
        driver.scheduler.apply(replace(result, tokens=result.tokens[:0]))
    with pytest.raises(EngineError, match="statistic"):
        driver.scheduler.apply(replace(result, statistics={"x": np.zeros((1, 1))}))
    driver.scheduler.apply(result)
    driver.scheduler.check()


def test_ctrl_c_is_nobodys_fault() -> None:
    driver = Driver()
    first, second = driver.add(tokens(9, 1), 4), driver.add(tokens(9, 2), 4)
    assert driver.scheduler.schedule() is not None
    driver.scheduler.fail(KeyboardInterrupt())
    assert {first.status, second.status} == {Status.PREEMPTED}
    driver.scheduler.check()
    driver.run()
    assert {first.error, second.error} == {None}


def test_a_beside_copy_that_failed_leaves_everything_where_it_was() -> None:
    driver = Driver(num_blocks=8, block_size=4, enable_prefix_caching=False)
    request = driver.add(tokens(9, 1), 8)
    driver.step()
    memory, [lane] = driver.memory, request.lanes
    driver.scheduler.evict(request.sequences[0], [0, 1, 2])
    driver._deaths[request.sequences[0]] |= dict.fromkeys([0, 1, 2], 9)
    copy = memory.relocate(lane, np.array([3]), np.array([9]), beside=True)
    before = memory.tokens.live(lane)[0].tolist()
    plan = driver.scheduler.schedule()
    assert plan is not None
    driver.scheduler.apply(replace(driver.sim.execute(plan), failed=(copy.ticket,)))
    assert before[0] in memory.tokens.live(lane)[0].tolist()
    assert not memory.pool.pins.any()
    driver.scheduler.check()
