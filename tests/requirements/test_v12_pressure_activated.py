"""V12: token-level memory is worked on under pressure alone: while blocks are plenty, nothing of it is ever planned."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.driving import Driver, evict_scattered, tokens
from tests.strategies import block_sizes
from vtoken.memory.kv_cache_manager import KVCacheManager

PLENTY = 400  # four times what the largest load takes


def run(num_blocks: int, block_size: int, lengths: list[int], percent: int = 0) -> Driver:
    """Answers of 24 tokens to these prompts; `percent` of the live tokens die at a prompt's end and every 8 tokens."""
    evictor = evict_scattered(8, percent) if percent else None
    driver = Driver(num_blocks, block_size, keep_plans=True, evictor=evictor, enable_prefix_caching=False)
    for i, length in enumerate(lengths):
        driver.add(tokens(length, i), 24)
    return driver.run()


def num_planned(driver: Driver) -> dict[str, int]:
    """What was planned to win memory back."""
    memory = driver.memory.counters
    return {
        "copies": sum(len(plan.copies) for plan in driver.plans),
        "tokens relocated": memory.tokens_relocated,
        "blocks reclaimed": memory.blocks_reclaimed,
        "preemptions": driver.counters.preemptions,
    }


prompts = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@settings(max_examples=40)
@given(block_size=block_sizes(), lengths=prompts)
def test_without_evictions_nothing_is_planned(block_size: int, lengths: list[int]) -> None:
    driver = run(PLENTY, block_size, lengths)
    assert set(num_planned(driver).values()) == {0}
    assert driver.memory.counters.tokens_evicted == 0


@settings(max_examples=40)
@given(block_size=block_sizes(), lengths=prompts, percent=st.integers(10, 60))
def test_holes_alone_are_no_reason(block_size: int, lengths: list[int], percent: int) -> None:
    assert set(num_planned(run(PLENTY, block_size, lengths, percent)).values()) == {0}


def test_the_planner_is_not_even_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: object, **kwargs: object) -> None:
        raise AssertionError("there is no pressure")

    for name in ("reclaim", "relocate", "swap_out", "swap_in"):
        monkeypatch.setattr(KVCacheManager, name, asked)
    driver = run(PLENTY, 4, [30, 7, 22], percent=40)
    assert driver.memory.counters.tokens_evicted > 0


def test_under_pressure_holes_are_reclaimed() -> None:
    """The same load in a pool that it fills: what the tests above find to be nothing does happen then."""
    planned = num_planned(run(24, 4, [30, 7, 22, 30], percent=40))
    assert planned["blocks reclaimed"] > 0
    assert planned["tokens relocated"] > 0
    assert planned["copies"] > 0
