"""U21 (and U02 as far as it goes without a server): aborts in every state, at any moment, any number of times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.driving import Driver, Request, StepFailure, tokens
from vtoken.schedule.sequence import FinishReason, Status


def load(driver: Driver) -> Request:
    """Three requests; the last, with two choices, is the one that gives way when blocks are short."""
    driver.add(tokens(20, 1), 60)
    driver.add(tokens(20, 2), 60)
    return driver.add(tokens(22, 3), 30, n=2, temperature=1.0)


def waiting() -> tuple[Driver, Request]:
    driver = Driver(max_num_seqs=3)
    request = load(driver)
    driver.step()
    assert request.status is Status.WAITING
    return driver, request


def never_stepped() -> tuple[Driver, Request]:
    driver = Driver()
    return driver, load(driver)


def prefilling() -> tuple[Driver, Request]:
    driver = Driver(max_num_seqs=8, max_num_batched_tokens=16)
    request = load(driver)
    driver.run_until(lambda: request.lanes != [])
    assert 0 < driver.memory.tokens.lengths[request.lanes[0]] < 22
    assert len(request.unforked) == 1
    return driver, request


def decoding() -> tuple[Driver, Request]:
    driver = Driver()
    request = load(driver)
    driver.run_until(lambda: request.sequences[1].num_output_tokens == 3)
    return driver, request


def one_choice_ended() -> tuple[Driver, Request]:
    free = Driver()
    request = load(free)
    free.run()
    first, second = (sequence.output_token_ids for sequence in request.sequences)
    assert first[4] not in second
    driver = Driver(eos=frozenset({first[4]}))
    request = load(driver)
    driver.run_until(lambda: len(request.unfinished) == 1)
    return driver, request


def preempted() -> tuple[Driver, Request]:
    driver = Driver(num_blocks=24, block_size=4)
    request = load(driver)
    driver.run_until(lambda: request.status is Status.PREEMPTED)
    return driver, request


def swapped() -> tuple[Driver, Request]:
    driver = Driver(num_blocks=24, block_size=4, num_host_blocks=24, preemption="swap")
    request = load(driver)
    driver.run_until(lambda: request.status is Status.SWAPPED)
    assert driver.memory.host_pool.num_free < 24
    return driver, request


def under_suspicion() -> tuple[Driver, Request]:
    driver = Driver(fault=lambda plan, ran: StepFailure() if plan.step == 3 else None)
    request = load(driver)
    driver.run_until(lambda: driver.counters.failed_steps == 1)
    assert request.status is Status.PREEMPTED
    return driver, request


STATES = [waiting, never_stepped, prefilling, decoding, one_choice_ended, preempted, swapped, under_suspicion]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("in_flight", [False, True])
def test_u21_an_abort_in_any_state(state: Callable[[], tuple[Driver, Request]], in_flight: bool) -> None:
    driver, request = state()
    before = [len(sequence.output_token_ids) for sequence in request.sequences]
    ended = [sequence.finish_reason for sequence in request.sequences]

    def abort() -> None:
        assert driver.scheduler.abort(request.request_id)

    if in_flight:
        driver.step(in_flight=abort)
    else:
        abort()
    assert request.status is Status.FINISHED
    assert request.lanes == []
    assert driver.memory.host_pool.num_free == driver.num_host_blocks
    driver.scheduler.check()
    for sequence, reason in zip(request.sequences, ended, strict=True):
        assert sequence.finish_reason is (reason or FinishReason.ABORT)
    assert not driver.scheduler.abort(request.request_id)
    driver.run()  # the others' answers are right, the part answer is the beginning of the right one
    assert driver.counters.finished[FinishReason.ABORT] == 1
    after = [len(sequence.output_token_ids) for sequence in request.sequences]
    assert all(b <= a <= b + in_flight for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("request_id", ["", "unknown", "0 "])
def test_u21_unknown_ids_abort_nothing(request_id: str) -> None:
    driver = Driver()
    load(driver)
    driver.step(in_flight=lambda: [driver.scheduler.abort(request_id)])
    assert not driver.scheduler.abort(request_id)
    driver.run()
    assert driver.counters.finished[FinishReason.ABORT] == 0


def test_u21_many_aborts_of_one_request_in_one_step() -> None:
    driver, request = decoding()
    driver.step(in_flight=lambda: [driver.scheduler.abort(request.request_id) for _ in range(5)])
    driver.run()
    assert driver.counters.finished[FinishReason.ABORT] == 1


def test_u21_an_abort_in_the_step_that_ends_the_request_comes_too_late() -> None:
    driver = Driver()
    request = driver.add(tokens(5, 1), 1)
    driver.step(in_flight=lambda: driver.scheduler.abort(request.request_id))
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert driver.counters.finished[FinishReason.ABORT] == 0
    # The old abort does not fall on a new request of the same name.
    again = driver.add(tokens(5, 1), 3, request_id=request.request_id)
    driver.run()
    assert again.sequences[0].finish_reason is FinishReason.LENGTH


def test_u21_an_id_can_be_used_again_after_its_abort() -> None:
    driver, request = decoding()
    driver.scheduler.abort(request.request_id)
    again = driver.add(tokens(5, 9), 3, request_id=request.request_id)
    driver.run()
    assert again.sequences[0].finish_reason is FinishReason.LENGTH


def test_u02_all_blocks_are_back_within_a_step() -> None:
    driver = Driver(num_blocks=100, max_num_seqs=16, enable_prefix_caching=False)
    for i in range(40):
        driver.add(tokens(10 + i, i), 400, ignore_eos=True)
    for number in range(40):
        driver.step(in_flight=lambda number=number: driver.scheduler.abort(str(number)))
    assert driver.memory.pool.num_free == 100
    driver.run()
    assert driver.counters.finished[FinishReason.ABORT] == 40
