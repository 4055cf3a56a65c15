"""The pressure ladder: free, forget, drain, reclaim, evict, preempt, in this order and not further than needed (X4)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.driving import Driver, tokens
from vtoken.schedule.sequence import Request

UNDER_PRESSURE: dict[str, Any] = {"kv_policy": "random", "kv_budget": 24}


def crowd(driver: Driver, count: int, prompt: int = 60, answer: int = 40, **params: Any) -> list[Request]:
    return [driver.add(tokens(prompt, i), answer, **params) for i in range(count)]


def test_with_blocks_to_spare_nothing_dies_and_nothing_moves() -> None:
    driver = Driver(num_blocks=200, block_size=8)
    requests = crowd(driver, 4, **UNDER_PRESSURE)
    driver.run()
    counters = driver.counters
    assert all(not request.sequences[0].died_at for request in requests)
    assert counters.forgets == counters.drains == counters.reclaims == counters.evictions == counters.preemptions == 0
    assert driver.memory.decisions.latest is None, "a plan was made without pressure"


def test_forgetting_comes_before_evicting() -> None:
    driver = Driver(num_blocks=30, block_size=8)
    driver.add(tokens(150, 9), 8)
    driver.run()
    assert driver.memory.prefix.num_cached > 10
    crowd(driver, 2, **UNDER_PRESSURE)
    driver.run()
    assert driver.counters.forgets > 0
    assert driver.counters.evictions == driver.counters.preemptions == 0


def test_holes_are_reclaimed_before_anything_dies() -> None:
    """One sequence has lost tokens by order; its holes are enough for the other."""
    driver = Driver(num_blocks=20, block_size=8, enable_prefix_caching=False)
    first = driver.add(tokens(100, 1), 20)
    driver.step()
    driver.step()
    driver.scheduler.evict(first.sequences[0], [p for p in range(2, 98) if p % 3])
    driver._deaths[first.sequences[0]] = driver.scheduler.died_at(first.sequences[0])
    second = driver.add(tokens(80, 2), 20, **UNDER_PRESSURE)
    driver.run()
    assert driver.counters.reclaims > 0
    assert driver.counters.evictions == driver.counters.preemptions == 0
    assert not second.sequences[0].died_at


def test_evicting_comes_before_preempting_and_stops_at_the_budget() -> None:
    driver = Driver(num_blocks=40, block_size=8, enable_prefix_caching=False)
    requests = crowd(driver, 4, prompt=60, answer=60, **UNDER_PRESSURE)
    while driver.scheduler.num_unfinished:
        driver.step()
        for request in driver.scheduler.running:
            for lane in request.lanes:
                length, live = driver.memory.tokens.lengths[lane], driver.memory.tokens.num_live[lane]
                assert live >= min(24, length)
    driver.check_outputs()
    assert driver.counters.evictions > 0
    assert driver.counters.tokens_evicted_under_pressure > 0
    assert driver.counters.preemptions == 0
    assert any(request.sequences[0].died_at for request in requests)


def test_the_sequence_with_most_above_its_budget_gives_first() -> None:
    driver = Driver(num_blocks=30, block_size=8, enable_prefix_caching=False)
    long = driver.add(tokens(120, 1), 60, **UNDER_PRESSURE)
    short = driver.add(tokens(40, 2), 60, **UNDER_PRESSURE)
    driver.run_until(lambda: driver.counters.evictions > 0)
    assert driver.scheduler.died_at(long.sequences[0])
    assert not driver.scheduler.died_at(short.sequences[0])
    driver.run()


def test_preempting_first_when_asked_to() -> None:
    driver = Driver(num_blocks=40, block_size=8, enable_prefix_caching=False, kv={"on_pressure": "preempt"})
    requests = crowd(driver, 4, prompt=60, answer=60, **UNDER_PRESSURE)
    driver.run()
    assert driver.counters.preemptions > 0
    assert driver.counters.evictions == 0
    assert all(not request.sequences[0].died_at for request in requests)


def test_a_waiting_request_is_pressure_too() -> None:
    driver = Driver(num_blocks=20, block_size=8, enable_prefix_caching=False)
    first = driver.add(tokens(130, 1), 20, **UNDER_PRESSURE)
    driver.step()
    driver.run_until(lambda: driver.memory.tokens.lengths[first.lanes[0]] > 130)
    second = driver.add(tokens(60, 2), 20)  # may lose nothing itself
    driver.step()
    driver.step()
    assert len(driver.scheduler.running) == 2
    driver.run()
    assert first.sequences[0].died_at
    assert not second.sequences[0].died_at


def test_unless_admission_may_not_evict() -> None:
    driver = Driver(num_blocks=20, block_size=8, enable_prefix_caching=False, kv={"admission_evicts": False})
    first = driver.add(tokens(130, 1), 20, **UNDER_PRESSURE)
    driver.step()
    driver.run_until(lambda: driver.memory.tokens.lengths[first.lanes[0]] > 130)
    driver.add(tokens(60, 2), 20)
    driver.step()
    assert len(driver.scheduler.running) == 1
    driver.run()
    assert not first.sequences[0].died_at


def test_nothing_is_evicted_for_a_request_that_would_not_fit_even_so() -> None:
    driver = Driver(num_blocks=24, block_size=8, enable_prefix_caching=False)
    first = driver.add(tokens(40, 1), 60, **UNDER_PRESSURE)
    driver.step()
    driver.add(tokens(180, 2), 8)
    for _ in range(20):
        driver.step()
    assert len(driver.scheduler.running) == 1
    assert not driver.scheduler.died_at(first.sequences[0])
    driver.run()


@pytest.mark.parametrize("mode", ["naive", "repack", "vtoken"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_every_mode_survives_pressure(mode: str, preemption: str) -> None:
    driver = Driver(
        num_blocks=30, num_host_blocks=30, preemption=preemption, block_size=8, kv={"kv_mode": mode}
    )  # fmt: skip
    for i in range(8):
        driver.add(
            tokens(30 + 10 * i, i % 3),
            30,
            n=1 + i % 2,
            temperature=float(i % 2),
            kv_policy=["random", "h2o", "knorm"][i % 3],
            kv_budget=[20, 0.5, 30][i % 3],
        )
    driver.run()


def test_copies_beside_the_steps_give_blocks_back_a_step_later() -> None:
    driver = Driver(
        num_blocks=40, block_size=8, enable_prefix_caching=False, kv={"kv_copies": "beside"}, beside_delay=2
    )
    crowd(driver, 4, prompt=60, answer=60, **UNDER_PRESSURE)
    driver.run()
    assert driver.counters.drains > 0
    assert driver.counters.tokens_evicted_under_pressure > 0
