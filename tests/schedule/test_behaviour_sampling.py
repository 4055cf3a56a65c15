"""U37, U38: the draws of a choice belong to its request, its seed and its number."""

from __future__ import annotations

from tests.driving import Driver, tokens
from vtoken.schedule.sequence import FinishReason

PROMPT = tokens(20, 1)


def choices(driver: Driver, **params: object) -> list[list[int]]:
    request = driver.add(PROMPT, 24, **{"temperature": 1.0, "seed": 123, **params})
    driver.run()
    return [sequence.output_token_ids for sequence in request.sequences]


def test_u37_choices_differ_and_come_again_with_the_seed() -> None:
    first, again, other = choices(Driver(), n=4), choices(Driver(), n=4), choices(Driver(), n=4, seed=124)
    assert len({tuple(choice) for choice in first}) == 4
    assert first == again
    assert not {tuple(choice) for choice in first} & {tuple(choice) for choice in other}


def test_u37_greedy_choices_are_alike() -> None:
    assert len({tuple(choice) for choice in choices(Driver(), n=3, temperature=0.0)}) == 1


def test_u37_every_choice_ends_by_itself() -> None:
    driver = Driver(vocab_size=30, eos=frozenset({4}))
    request = driver.add(tokens(20, 1, vocab_size=30), 30, n=6, temperature=1.0)
    driver.run()
    reasons = [choice.finish_reason for choice in request.sequences]
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH}
    for choice in request.sequences:
        assert (choice.output_token_ids[-1] == 4) == (choice.finish_reason is FinishReason.STOP)
        assert choice.finish_reason is FinishReason.STOP or choice.num_output_tokens == 30
    assert driver.counters.tokens_generated == sum(choice.num_output_tokens for choice in request.sequences)
    assert driver.counters.finished[FinishReason.LENGTH] == 1  # requests are counted, by the choice that ended last


def test_u38_neighbours_do_not_matter() -> None:
    alone = choices(Driver(), n=3)
    crowded = Driver(num_blocks=20, max_num_batched_tokens=40, preemption="swap", num_host_blocks=20)
    for i in range(5):
        crowded.add(tokens(12 + i, 50 + i), 30, temperature=1.0, n=1 + i % 2)
    for _ in range(4):
        crowded.step()
    assert choices(crowded, n=3) == alone
    assert crowded.counters.preemptions > 0


def test_u38_choice_0_is_the_lone_request_with_that_seed() -> None:
    assert choices(Driver(), n=3)[0] == choices(Driver(), n=1)[0]


def test_u38_equal_requests_with_different_seeds_differ() -> None:
    driver = Driver()
    for seed in (1, 2, -1):
        driver.add(PROMPT, 8, temperature=1.0, seed=seed)
    driver.run()
    assert len({tuple(output[0]) for output in driver.outputs}) == 3
