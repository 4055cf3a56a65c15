"""U01, U08, U10, U24, U26, U45: who gets in, who waits, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from tests.driving import Driver, evict_scattered, tokens
from vtoken.base.errors import CapacityError, RequestError
from vtoken.schedule.sequence import FinishReason, Status


class TestU01NeverFits:
    @pytest.mark.parametrize(("prompt", "max_tokens", "n", "field"), [(64, 1, 1, "prompt"), (20, 30, 4, "n")])
    def test_it_is_refused_at_once_and_later_ones_go_on(self, prompt: int, max_tokens: int, n: int, field: str) -> None:
        driver = Driver(num_blocks=4, block_size=16)
        driver.add(tokens(30, 1), 20)
        driver.step()
        with pytest.raises(RequestError, match="64 tokens") as error:
            driver.add(tokens(prompt, 2), max_tokens, n=n)
        assert error.value.field == field
        driver.add(tokens(30, 3), 20)
        driver.run()
        assert driver.counters.finished[FinishReason.LENGTH] == 2

    def test_what_just_fits_an_empty_pool_is_served(self) -> None:
        driver = Driver(num_blocks=4, block_size=16)
        driver.add(tokens(63, 1), 1)
        driver.add(tokens(20, 2), 13, n=3)
        driver.add(tokens(10, 3), 5)
        driver.run()
        assert driver.counters.finished[FinishReason.LENGTH] == 3
        with pytest.raises(CapacityError):
            driver.add(tokens(20, 2), 14, n=4)


class TestU08FarTooSmallPool:
    def load(self, **settings: object) -> Driver:
        driver = Driver(**{"num_blocks": 24, "block_size": 16, "max_num_batched_tokens": 32, **settings})
        for i in range(8):
            driver.add(tokens(200, i), 100, ignore_eos=True)
        return driver

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_all_end_with_few_preemptions(self, preemption: str) -> None:
        driver = self.load(preemption=preemption, num_host_blocks=24).run()
        assert all(request.sequences[0].num_output_tokens == 100 for request in driver.requests)
        assert driver.counters.preemptions <= 40
        assert driver.counters.steps < 5 * driver.solo_steps()

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_also_when_prompts_are_short_and_answers_long(self, preemption: str) -> None:
        """Here admission cannot see it coming: six prompts fit side by side, and not even two answers."""
        driver = Driver(num_blocks=24, max_num_batched_tokens=32, preemption=preemption, num_host_blocks=24)
        for i in range(8):
            driver.add(tokens(40, i), 260)
        driver.run(max_steps=5 * driver.solo_steps())
        assert 0 < driver.counters.preemptions <= 40
        assert driver.counters.steps < driver.solo_steps()

    def test_the_oldest_always_goes_on(self) -> None:
        driver = Driver(num_blocks=24, max_num_batched_tokens=32)
        for i in range(8):
            driver.add(tokens(40, i), 260)
        while driver.scheduler.num_unfinished:
            oldest = driver.scheduler.running[0] if driver.scheduler.running else None
            before = oldest and driver.memory.tokens.lengths[oldest.lanes[0]]
            driver.step()
            assert oldest is None or not oldest.lanes or driver.memory.tokens.lengths[oldest.lanes[0]] > before
            assert oldest is None or oldest.status in (Status.RUNNING, Status.FINISHED)


class TestU10PoolRunsDryMidAnswer:
    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_every_stream_delivers_all_its_tokens(self, preemption: str) -> None:
        driver = Driver(num_blocks=16, block_size=16, preemption=preemption, num_host_blocks=16)
        for i in range(4):
            driver.add(tokens(48, i), 48, ignore_eos=True)
        driver.run()
        assert driver.counters.preemptions > 0
        for request in driver.requests:
            assert len(request.sequences[0].output_token_ids) == 48
            assert request.sequences[0].finish_reason is FinishReason.LENGTH


class TestU24MaxTokens:
    @pytest.mark.parametrize(("prompt", "max_tokens", "delivered"), [(200, 4096, 56), (200, None, 56), (255, 9, 1)])
    def test_is_an_upper_bound(self, prompt: int, max_tokens: int | None, delivered: int) -> None:
        driver = Driver(num_blocks=64, max_model_len=256)
        request = driver.add(tokens(prompt, 1), max_tokens)
        driver.run()
        assert request.sequences[0].num_output_tokens == delivered
        assert request.sequences[0].finish_reason is FinishReason.LENGTH

    def test_a_prompt_without_room_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(RequestError, match=r"256 tokens leave no room.* 256 tokens .* at most 255"):
            Driver(num_blocks=64, max_model_len=256).add(tokens(256, 1), 1)


class TestU26NoSpace:
    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_after_a_full_pool_answers_are_as_on_a_fresh_one(self, preemption: str) -> None:
        fixed = tokens(50, 7)
        fresh = Driver(num_blocks=30)
        fresh.add(fixed, 30, seed=0)
        fresh.run()
        driver = Driver(num_blocks=30, preemption=preemption, num_host_blocks=10)
        for i in range(6):
            driver.add(tokens(40, i), 200)
        for _ in range(30):
            driver.step()
        for i in range(20):
            driver.add(tokens(10, 100 + i), 10)
        driver.run()
        assert driver.counters.preemptions > 0
        again = driver.add(fixed, 30, seed=0)
        driver.run()
        assert [again.sequences[0].output_token_ids] == fresh.outputs[0]


class TestU45HeadOfLine:
    BUDGET = 512

    def solo_prefill_steps(self) -> int:
        driver = Driver(num_blocks=1200, max_num_batched_tokens=self.BUDGET, checks=False)
        long = driver.add(tokens(8000, 0), 1)
        driver.run()
        assert long.first_token_time is not None
        return driver.counters.steps

    def test_short_ones_answer_before_the_long_prefill_ends(self) -> None:
        driver = Driver(num_blocks=1200, max_num_batched_tokens=self.BUDGET)
        long = driver.add(tokens(8000, 0), 16)
        driver.step()
        shorts = [driver.add(tokens(16, 1 + i), 16) for i in range(10)]
        driver.run()
        assert all(short.first_token_time < long.first_token_time for short in shorts)

    def test_the_long_one_is_not_starved_by_an_endless_stream(self) -> None:
        driver = Driver(num_blocks=1200, max_num_batched_tokens=self.BUDGET, max_num_seqs=64, checks=False)
        long = driver.add(tokens(8000, 0), 1)
        while not long.sequences[0].is_finished:
            while driver.scheduler.num_waiting < 40:
                driver.add(tokens(16, len(driver.requests)), 16)
            driver.step()
        assert driver.counters.steps <= 2 * self.solo_prefill_steps()
        assert driver.counters.finished[FinishReason.LENGTH] > 50
        driver.run()

    def test_small_ones_pass_a_big_one_that_waits_for_memory_but_not_for_ever(self) -> None:
        driver = Driver(num_blocks=20, block_size=4, max_num_seqs=8, max_passes=5)
        driver.add(tokens(20, 0), 40)
        driver.step()
        big = driver.add(tokens(60, 1), 8)
        while big.status is Status.WAITING:
            while driver.scheduler.num_waiting < 4:
                driver.add(tokens(4, len(driver.requests)), 6)
            driver.step()
        driver.run()
        passed = [r for r in driver.requests[2:] if r.first_scheduled_time < big.first_scheduled_time]
        assert len(passed) == big.num_passes == 5


def test_evicted_requests_are_admitted_and_end_as_any() -> None:
    driver = Driver(num_blocks=24, block_size=4, evictor=evict_scattered(6, 50))
    for i in range(12):
        driver.add(tokens(30, i), 30)
    driver.run()
    assert driver.counters.finished[FinishReason.LENGTH] == 12
