"""The step: budgets, order, limits, and misuse of the interface."""

from __future__ import annotations

import numpy as np
import pytest

from tests.driving import Driver, tokens
from vtoken.base.clock import ManualClock
from vtoken.base.errors import ConfigError, EngineError, RequestError
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.scheduler import Scheduler
from vtoken.schedule.sequence import FinishReason, Status


def shares(driver: Driver) -> dict[str, int]:
    """Tokens that each request has in the next step."""
    driver.keep_plans = True
    driver.step()
    plan = driver.plans[-1]
    of_lane = {lane: r.request_id for r in driver.requests for lane in r.lanes}
    return {
        of_lane[lane]: count for lane, count in zip(plan.lanes.tolist(), np.diff(plan.starts).tolist(), strict=True)
    }


class TestBudget:
    def test_a_step_has_no_more_tokens_than_allowed(self) -> None:
        driver = Driver(max_num_seqs=8, max_num_batched_tokens=10, keep_plans=True, num_blocks=100)
        for i in range(12):
            driver.add(tokens(5 + 7 * i, i), 8)
        driver.run()
        counts = [plan.num_tokens for plan in driver.plans]
        assert max(counts) == 10
        assert sum(counts) == driver.counters.tokens_computed == sum(5 + 7 * i + 7 for i in range(12))

    def test_no_more_sequences_run_than_allowed_choices_included(self) -> None:
        driver = Driver(max_num_seqs=4, num_blocks=100)
        for i in range(6):
            driver.add(tokens(5, i), 8, n=1 + i % 3)
        most = 0
        while driver.scheduler.num_unfinished:
            driver.step()
            running = sum(len(request.unfinished) for request in driver.scheduler.running)
            most = max(most, running)
            assert running <= 4
        assert most == 4
        driver.check_outputs()

    def test_decodes_go_first_and_prompts_share_the_rest(self) -> None:
        driver = Driver(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=100)
        driver.add(tokens(4, 0), 50, request_id="decode")
        driver.step()
        driver.add(tokens(100, 1), 4, request_id="long")
        driver.add(tokens(5, 2), 4, request_id="short")
        assert shares(driver) == {"decode": 1, "long": 15}  # admitted in order: the long one took what was left
        # From now on both prompts are known: the short one needs 5, the oldest prompt has the rest.
        assert shares(driver) == {"decode": 1, "long": 10, "short": 5}

    def test_a_long_prompt_takes_all_when_nobody_else_could_use_it(self) -> None:
        driver = Driver(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=100)
        driver.add(tokens(40, 0), 2, request_id="long")
        assert [shares(driver) for _ in range(3)] == [{"long": 16}, {"long": 16}, {"long": 8}]

    def test_the_oldest_prompt_keeps_half_of_the_budget(self) -> None:
        driver = Driver(max_num_seqs=8, max_num_batched_tokens=16, num_blocks=100)
        for name in ("first", "second", "third"):
            driver.add(tokens(100, len(driver.requests)), 2, request_id=name)
        driver.step()
        assert shares(driver) == {"first": 8, "second": 8}


class TestOrder:
    def test_requests_are_admitted_as_they_came(self) -> None:
        driver = Driver(max_num_seqs=2, num_blocks=100)
        for i in range(5):
            driver.add(tokens(5, i), 4)
        driver.run()
        assert [request.first_scheduled_time for request in driver.requests] == [0, 0, 4, 4, 8]

    @pytest.mark.parametrize("max_passes", [0, 1, 3])
    def test_few_may_pass_one_that_waits_for_memory(self, max_passes: int) -> None:
        driver = Driver(num_blocks=8, block_size=4, max_passes=max_passes)
        driver.add(tokens(12, 0), 8, request_id="runs")
        driver.step()
        big = driver.add(tokens(24, 1), 4, request_id="big")
        for i in range(6):
            driver.add(tokens(2, 2 + i), 2, request_id=f"small{i}")
        driver.run()
        before_big = [r for r in driver.requests[2:] if r.first_scheduled_time < big.first_scheduled_time]
        assert len(before_big) == max_passes == big.num_passes

    def test_times_are_the_clocks(self) -> None:
        driver = Driver(num_blocks=100, max_num_seqs=1, max_num_batched_tokens=4)
        for i in range(2):
            driver.add(tokens(8, i), 3)
        driver.clock.advance(0.5)
        driver.run()
        first, second = driver.requests
        assert (first.arrival_time, first.first_scheduled_time, first.first_token_time) == (0, 0.5, 1.5)
        assert (second.arrival_time, second.first_scheduled_time, second.first_token_time) == (0, 4.5, 5.5)
        assert (first.finish_time, second.finish_time) == (3.5, 7.5)


class TestEnds:
    def test_length(self) -> None:
        driver = Driver()
        request = driver.add(tokens(5, 1), 7)
        driver.run()
        assert len(request.sequences[0].output_token_ids) == 7
        assert request.sequences[0].finish_reason is FinishReason.LENGTH
        assert request.sequences[0].stop_reason is None
        assert driver.counters.finished[FinishReason.LENGTH] == 1

    @pytest.mark.parametrize("ignore_eos", [False, True])
    @pytest.mark.parametrize("own_stop", [False, True])
    def test_end_of_sequence_and_stop_tokens(self, ignore_eos: bool, own_stop: bool) -> None:
        free = Driver(vocab_size=50)
        text = free.add(tokens(5, 1), 100).sequences[0]
        free.run()
        eos, stop = text.output_token_ids[10], text.output_token_ids[20]
        driver = Driver(vocab_size=50, eos=frozenset({eos}))
        request = driver.add(tokens(5, 1), 100, ignore_eos=ignore_eos, stop_token_ids=[stop] if own_stop else [])
        driver.run()
        stops = {eos} if not ignore_eos else set()
        stops |= {stop} if own_stop else set()
        answer = request.sequences[0]
        if stops:
            end = next(i for i, token in enumerate(text.output_token_ids) if token in stops)
            assert answer.output_token_ids == text.output_token_ids[: end + 1]
            assert answer.finish_reason is FinishReason.STOP
            ended_by = text.output_token_ids[end]
            assert answer.stop_reason == (ended_by if own_stop and ended_by == stop else None)
        else:
            assert answer.output_token_ids == text.output_token_ids
            assert answer.finish_reason is FinishReason.LENGTH

    def test_one_token_is_computed_in_one_step(self) -> None:
        driver = Driver()
        driver.add(tokens(5, 1), 1, n=3)
        driver.run()
        assert driver.counters.steps == 1
        assert driver.counters.tokens_computed == 5
        assert driver.counters.tokens_generated == 3

    def test_finished_requests_are_handed_out_once(self) -> None:
        driver = Driver()
        request = driver.add(tokens(5, 1), 1)
        result = driver.executor.execute(driver.scheduler.schedule())
        driver.scheduler.apply(result)
        assert driver.scheduler.take_finished() == [request]
        assert driver.scheduler.take_finished() == []
        assert request.status is Status.FINISHED


class TestHoles:
    """A request with holes in its five blocks, and a later one whose two choices need one block more than there are."""

    def shortage(self, num_live: int) -> Driver:
        dead = [0, 4, 8, 12, 16, 1, 5][: 20 - num_live]
        driver = Driver(
            num_blocks=9,
            block_size=4,
            enable_prefix_caching=False,
            evictor=lambda sequence, length: dead if length == 20 and not sequence.request.index else (),
        )
        driver.add(tokens(20, 0), 2)
        driver.add(tokens(12, 1), 2, n=2)
        driver.step()
        driver.step()
        return driver

    def test_they_are_packed_before_anybody_is_preempted(self) -> None:
        driver = self.shortage(num_live=13)
        assert driver.memory.counters.blocks_reclaimed == 1
        assert driver.counters.preemptions == 0
        driver.run()

    def test_a_running_sequence_is_left_a_free_cell(self) -> None:
        driver = self.shortage(num_live=16)  # in four blocks it would need a fifth one at once
        assert driver.memory.counters.tokens_relocated == driver.memory.counters.blocks_reclaimed == 0
        assert driver.counters.preemptions == 1
        driver.run()


class TestMisuse:
    def plan(self, driver: Driver) -> StepPlan:
        plan = driver.scheduler.schedule()
        assert plan is not None
        return plan

    def test_steps_are_scheduled_and_applied_in_turn(self) -> None:
        driver = Driver()
        assert driver.scheduler.schedule() is None
        with pytest.raises(EngineError, match="not in flight"):
            driver.scheduler.apply(StepResult(0, np.empty(0, np.int32)))
        with pytest.raises(EngineError, match="no step in flight"):
            driver.scheduler.fail(RuntimeError())
        driver.add(tokens(5, 1), 4)
        plan = self.plan(driver)
        with pytest.raises(EngineError, match="in flight"):
            driver.scheduler.schedule()
        result = driver.executor.execute(plan)
        with pytest.raises(EngineError, match="step 7"):
            driver.scheduler.apply(StepResult(7, result.tokens))
        driver.scheduler.apply(result)
        with pytest.raises(EngineError, match="not in flight"):
            driver.scheduler.apply(result)

    def test_ids_in_use_are_refused_and_ended_ones_may_come_again(self) -> None:
        driver = Driver()
        driver.add(tokens(5, 1), 4, request_id="a")
        with pytest.raises(RequestError, match="request_id: 'a' is in use") as error:
            driver.add(tokens(5, 2), 4, request_id="a")
        assert error.value.field == "request_id"
        driver.run()
        again = driver.add(tokens(5, 2), 4, request_id="a")
        driver.run()
        assert again.status is Status.FINISHED

    def test_a_refused_request_leaves_no_trace(self) -> None:
        driver = Driver(num_blocks=4)
        with pytest.raises(RequestError):
            driver.add(tokens(64, 1), 4, request_id="a")
        assert driver.scheduler.num_unfinished == 0
        driver.add(tokens(5, 1), 4, request_id="a")
        driver.run()

    def test_only_what_lives_can_be_evicted_between_steps(self) -> None:
        driver = Driver()
        request = driver.add(tokens(5, 1), 8)
        sequence = request.sequences[0]
        with pytest.raises(ValueError, match="between steps"):
            driver.scheduler.evict(sequence, [0])
        driver.step()
        driver.scheduler.evict(sequence, [1, 3])
        with pytest.raises(KeyError, match="position 3"):
            driver.scheduler.evict(sequence, [3])
        with pytest.raises(KeyError, match="position 99"):
            driver.scheduler.evict(sequence, [99])
        with pytest.raises(ValueError, match="only once"):
            driver.scheduler.evict(sequence, [2, 2])
        plan = self.plan(driver)
        with pytest.raises(ValueError, match="between steps"):
            driver.scheduler.evict(sequence, [0])
        assert plan.past_live.tolist() == [3]

    def test_a_budget_below_the_number_of_sequences_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="max_num_batched_tokens=7 is below max_num_seqs=8"):
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7, max_model_len=100)

    def test_auto_needs_the_speeds_of_the_machine(self) -> None:
        config = SchedulerConfig(8, 8, 100, preemption="auto")
        with pytest.raises(ConfigError, match="PreemptionCosts"):
            Scheduler(config, KVCacheManager(8, 16), ManualClock())


def test_many_sequences_grow_the_tables_on_the_way() -> None:
    driver = Driver(num_blocks=400, block_size=4, max_num_seqs=70, max_num_batched_tokens=200)
    for i in range(60):
        driver.add(tokens(3 + i % 5, i), 20, n=1 + (i == 7))
    driver.run()
    assert max(request.first_scheduled_time for request in driver.requests) <= 3


def test_a_length_beyond_the_pool_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="max_model_len=66"):
        Driver(num_blocks=4, block_size=16, max_model_len=66)
