"""U12, U31, U32, U48, U61, U81: the prefix cache saves work, says how much, and changes no answer."""

from __future__ import annotations

import pytest

from tests.driving import Driver, Request, tokens


def ask(driver: Driver, prompt: list[int], max_tokens: int = 8, **params: object) -> Request:
    """Send a prompt and wait for its end."""
    request = driver.add(prompt, max_tokens, **{"seed": 0, **params})
    driver.run()
    return request


def test_u12_a_hit_gives_the_same_answer_as_a_miss() -> None:
    prompt = tokens(100, 1)
    cold = Driver(enable_prefix_caching=False)
    ask(cold, prompt)
    driver = Driver(num_blocks=60)
    cached = []
    for common in (16, 32, 33, 64):
        request = ask(driver, prompt)
        cached.append(request.num_cached_tokens)
        assert [request.sequences[0].output_token_ids] == cold.outputs[0]
        ask(driver, prompt[:common] + tokens(30, 2, common))
    assert cached == [0, 96, 96, 96]
    assert cold.requests[0].num_cached_tokens == 0


def test_u12_also_when_all_are_under_way_at_once() -> None:
    prompt = tokens(100, 1)
    driver = Driver(num_blocks=60, max_num_batched_tokens=40)
    for common in (16, 32, 33, 64):
        driver.add(prompt, 8, seed=0)
        driver.step()
        driver.add(prompt[:common] + tokens(30, 2, common), 8)
    driver.run()
    assert len({tuple(driver.outputs[i][0]) for i in (0, 2, 4, 6)}) == 1


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_u31_of_a_prompt_of_whole_blocks_the_last_one_is_computed_again(blocks: int) -> None:
    prompt = tokens(16 * blocks, 1)
    driver = Driver()
    first, second = ask(driver, prompt), ask(driver, prompt)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16 * (blocks - 1))
    assert first.sequences[0].output_token_ids == second.sequences[0].output_token_ids
    together = Driver(num_blocks=60)
    for _ in range(3):
        together.add(prompt, 8, seed=0)
    together.run()
    assert together.outputs == driver.outputs[:1] * 3


def test_u32_one_new_token_three_times_over() -> None:
    driver, prompt = Driver(), tokens(64, 1)
    answers = [ask(driver, prompt, 1) for _ in range(3)]
    assert [request.num_cached_tokens for request in answers] == [0, 48, 48]
    assert len({tuple(request.sequences[0].output_token_ids) for request in answers}) == 1
    assert driver.counters.tokens_computed == 64 + 16 + 16


@pytest.mark.parametrize("system", [15, 16, 40, 64])
def test_u48_hits_are_whole_blocks_of_what_is_common(system: int) -> None:
    driver = Driver()
    first = ask(driver, tokens(system, 0) + tokens(20, 1))
    other = ask(driver, tokens(system, 0) + tokens(20, 2))
    assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 16 * (system // 16))


def test_u48_the_second_turn_finds_the_first_one() -> None:
    driver = Driver()
    turn = tokens(40, 0) + tokens(10, 1)
    answer = ask(driver, turn, 20).sequences[0].output_token_ids
    history = turn + answer
    second = ask(driver, history + tokens(12, 2))
    # The last token drawn was never computed, so 69 of the 70 common ones could be in the cache.
    assert second.num_cached_tokens == 16 * (69 // 16)


def test_u48_cached_tokens_are_those_of_the_first_admission() -> None:
    driver = Driver(num_blocks=8)
    first, second = driver.add(tokens(30, 1), 60), driver.add(tokens(30, 2), 60)
    driver.run()
    assert driver.counters.preemptions_recompute > 0
    assert driver.memory.counters.prefix_hit_tokens > 0  # the one that came back found its own blocks
    assert first.num_cached_tokens == second.num_cached_tokens == 0


def test_u61_the_tail_is_forgotten_first_and_the_rest_still_hits() -> None:
    driver, prompt = Driver(), tokens(49, 1)
    answer = ask(driver, prompt, 1).sequences[0].output_token_ids
    assert len(driver.memory.prefix) == 3
    driver.memory.prefix.forget_oldest()
    again = ask(driver, prompt, 1)
    assert again.num_cached_tokens == 32
    assert again.sequences[0].output_token_ids == answer


def test_u61_without_its_first_block_a_chain_is_not_hit() -> None:
    driver, prompt = Driver(), tokens(49, 1)
    answer = ask(driver, prompt, 1).sequences[0].output_token_ids
    first_block = driver.memory.prefix.match(driver.requests[0].sequences[0].hashes, 3)[0].block
    driver.memory.prefix.forget_block(first_block)
    driver.check_idle()
    again = ask(driver, prompt, 1)
    assert again.num_cached_tokens == 0
    assert again.sequences[0].output_token_ids == answer


def test_u81_tenants_with_different_salts_share_nothing() -> None:
    driver, prompt = Driver(), tokens(40, 1)
    salts = ["a", "b", "a", None, "b", None]
    assert [ask(driver, prompt, cache_salt=salt).num_cached_tokens for salt in salts] == [0, 0, 32, 0, 32, 32]
    assert all("'a'" not in repr(request) and request.cache_salt is None for request in driver.requests)


def test_with_the_cache_off_nothing_is_kept() -> None:
    driver, prompt = Driver(enable_prefix_caching=False), tokens(40, 1)
    assert [ask(driver, prompt).num_cached_tokens for _ in range(2)] == [0, 0]
    assert driver.memory.usage().cached_blocks == 0
