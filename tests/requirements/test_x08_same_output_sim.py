"""X8 on the simulator: the same output with and without prefix cache, preemption and neighbours, whatever the block
size and the chunks; of sequences that lost tokens as well, recompute included. The simulator's answer changes with any
wrong read, and each run is held to the plain model besides.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.driving import Driver, Evictor, evict_scattered, percent_scattered, tokens

# Prompts that share 0, 20 or 36 tokens, or all: (what they share, own tokens, choices, temperature, answer).
REQUESTS = [
    (20, 7, 1, 0.0, 30),
    (20, 19, 1, 1.0, 24),
    (36, 5, 3, 1.0, 20),
    (0, 41, 1, 0.0, 28),
    (36, 12, 2, 0.7, 26),
    (36, 0, 1, 0.0, 12),
    (0, 3, 2, 1.0, 40),
    (36, 0, 1, 0.0, 12),
]
Outputs = list[list[list[int]]]
Deaths = list[list[dict[int, int]]]

# At each prompt's end and at every 7th token of an answer: lengths that every run comes through one by one.
EVICTORS: dict[str, Evictor | None] = {"whole": None, "evicted": evict_scattered(7, 35)}


def run(numbers: list[int] | None = None, **settings: object) -> Driver:
    """Some of the requests (all by default), each with the seed of its number."""
    driver = Driver(**{"num_blocks": 400, "max_num_batched_tokens": 64, **settings})
    for number in range(len(REQUESTS)) if numbers is None else numbers:
        shared, own, n, temperature, max_tokens = REQUESTS[number]
        prompt = tokens(36, 0)[:shared] + tokens(own, 1, number)
        driver.add(prompt, max_tokens, n=n, temperature=temperature, seed=number)
    return driver.run()


def facts(driver: Driver) -> tuple[Outputs, Deaths]:
    return driver.outputs, [[sequence.died_at for sequence in request.sequences] for request in driver.requests]


@cache
def undisturbed(kind: str) -> tuple[Outputs, Deaths]:
    """Every request alone, in a huge pool, no prefix cache, every prompt in one chunk."""
    alone = [
        facts(run([i], enable_prefix_caching=False, max_num_batched_tokens=4096, evictor=EVICTORS[kind]))
        for i in range(len(REQUESTS))
    ]
    return [outputs[0] for outputs, _ in alone], [deaths[0] for _, deaths in alone]


pytestmark = pytest.mark.parametrize("kind", EVICTORS)


def test_the_evictions_are_worth_testing(kind: str) -> None:
    outputs, deaths = undisturbed(kind)
    if kind == "whole":
        assert not any(died_at for request in deaths for died_at in request)
        return
    assert outputs != undisturbed("whole")[0]
    for request in deaths:
        for died_at in request:
            assert len(died_at) >= 3
            assert percent_scattered(died_at) >= 30  # not simply the oldest token each time


@pytest.mark.parametrize("prefix", [False, True])
def test_neighbours(kind: str, prefix: bool) -> None:
    driver = run(enable_prefix_caching=prefix, evictor=EVICTORS[kind])
    assert facts(driver) == undisturbed(kind)
    assert (driver.memory.counters.prefix_hit_tokens > 0) == prefix


def test_a_cache_that_is_warm(kind: str) -> None:
    driver = run(evictor=EVICTORS[kind])
    for request in driver.requests[:]:
        again = driver.add(
            request.prompt_token_ids,
            request.params.max_tokens,
            n=request.params.n,
            temperature=request.params.temperature,
            seed=request.seed,
        )
        driver.run()
        assert [s.output_token_ids for s in again.sequences] == [s.output_token_ids for s in request.sequences]
        assert [s.died_at for s in again.sequences] == [s.died_at for s in request.sequences]
        full = (request.num_prompt_tokens - 1) // 16 * 16
        # Where tokens died, others may have been written over the prompt's blocks, which are not to be found then.
        assert again.num_cached_tokens == full or (kind == "evicted" and again.num_cached_tokens < full)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("preemption", "num_host_blocks"), [("recompute", 0), ("swap", 90), ("swap", 6)])
def test_preemption(kind: str, preemption: str, num_host_blocks: int, prefix: bool) -> None:
    swaps = recomputes = fallbacks = 0
    for num_blocks in (26, 30, 36):
        driver = run(
            num_blocks=num_blocks,
            block_size=4,
            preemption=preemption,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=prefix,
            evictor=EVICTORS[kind],
        )
        assert facts(driver) == undisturbed(kind)
        swaps += driver.counters.preemptions_swap
        recomputes += driver.counters.preemptions_recompute
        fallbacks += driver.counters.swap_fallbacks
    assert (swaps > 0) == (preemption == "swap")
    assert recomputes > 0 or num_host_blocks == 90
    assert (fallbacks > 0) == (num_host_blocks == 6)


@pytest.mark.parametrize("block_size", [4, 5, 8, 16, 31, 32, 33, 64, 100, 256])
def test_block_size(kind: str, block_size: int) -> None:
    pools = (-(-160 // block_size) + 8, 400)  # tight in tokens, with a block for each sequence; and huge
    for num_blocks in pools:
        driver = run(block_size=block_size, num_blocks=num_blocks, evictor=EVICTORS[kind])
        assert facts(driver) == undisturbed(kind)


@pytest.mark.parametrize("budget", [4, 5, 9, 17, 40, 128, 4096])
def test_chunks(kind: str, budget: int) -> None:
    driver = run(max_num_batched_tokens=budget, max_num_seqs=4, evictor=EVICTORS[kind])
    assert facts(driver) == undisturbed(kind)


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 2, 5, 1, 7, 4], [2, 4]])
def test_order_of_arrival(kind: str, order: list[int]) -> None:
    outputs, deaths = undisturbed(kind)
    driver = run(order, num_blocks=40, block_size=4, evictor=EVICTORS[kind])
    assert facts(driver) == ([outputs[i] for i in order], [deaths[i] for i in order])
