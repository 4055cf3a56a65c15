"""P8: a system prompt is computed once, and parallel samples share their prompt: counted in tokens computed."""

from __future__ import annotations

import pytest

from tests.driving import Driver, tokens

SYSTEM = tokens(48, 0)  # three blocks of 16


@pytest.mark.parametrize("one_after_the_other", [False, True])
def test_a_system_prompt_is_computed_once(one_after_the_other: bool) -> None:
    driver = Driver(num_blocks=200, max_num_batched_tokens=1024)
    for i in range(10):
        driver.add(SYSTEM + tokens(10 + i, 1, i), 5)
        if one_after_the_other:
            driver.run()
    driver.run()
    own = sum(10 + i + 4 for i in range(10))  # the last token drawn is not computed
    assert driver.counters.tokens_computed == 48 + own
    assert [request.num_cached_tokens for request in driver.requests] == [0] + [48] * 9


def test_without_the_cache_it_is_computed_for_each() -> None:
    driver = Driver(num_blocks=200, max_num_batched_tokens=1024, enable_prefix_caching=False)
    for i in range(10):
        driver.add(SYSTEM + tokens(10, 1, i), 5)
    driver.run()
    assert driver.counters.tokens_computed == 10 * (48 + 10 + 4)


@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize("prefix", [False, True])
def test_parallel_samples_share_their_prompt(n: int, prefix: bool) -> None:
    driver = Driver(num_blocks=200, max_num_batched_tokens=32, enable_prefix_caching=prefix)
    request = driver.add(tokens(50, 1), 6, n=n, temperature=1.0)
    driver.run_until(lambda: request.sequences[0].num_output_tokens > 0)
    held = driver.memory.usage()
    assert (held.held_blocks, held.shared_blocks) == (4, 4 if n > 1 else 0)
    assert {state.refs for lane in request.lanes for state in driver.memory.table(lane)} == {n}
    driver.step()
    held = driver.memory.usage()
    assert (held.held_blocks, held.shared_blocks) == (3 + n, 3 if n > 1 else 0)
    driver.run()
    assert driver.counters.tokens_computed == 50 + n * 5
    assert driver.memory.counters.blocks_copied_on_write == n - 1
