"""Beams in the real scheduler over the simulated executor: what is found is what a plain search finds that keeps no
blocks, whatever happens on the way, and all blocks are back in the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.driving import VOCAB_SIZE, DrawFailure, Driver, StepFailure, mix, tokens
from vtoken.base.errors import RequestError
from vtoken.base.hashing import uniform
from vtoken.base.sampling_params import MAX_LENGTH_PENALTY, SamplingParams
from vtoken.executor.sim import _A, _B
from vtoken.schedule.beam_search import BeamSearch
from vtoken.schedule.capacity import MAX_LENGTH
from vtoken.schedule.plan import StepPlan
from vtoken.schedule.sequence import FinishReason, Request

WIDTH, LENGTH = 4, 24
PROMPTS = [tokens(length, 7, i) for i, length in enumerate([9, 30, 3, 17])]


def offers(text: list[int], count: int) -> tuple[list[int], list[float]]:
    """What the simulated model offers after a text, in Python integers: see `SimExecutor`."""
    total = 0
    for position, token in enumerate(text):
        total = (total + int(_A) * mix(token, position) + int(_B) * total) % 2**64
    first = mix(total, 0xBEA) % VOCAB_SIZE
    logprobs = -np.sort(uniform(np.uint64(total), np.arange(count)))
    return [(first + i) % VOCAB_SIZE for i in range(count)], logprobs.tolist()


def plain_search(prompt: list[int], params: SamplingParams, ends: set[int]) -> list[tuple[list[int], float]]:
    """(answer, log-probability) of the best, by the rules of `transformers` written down once more."""
    width, running, finished = params.num_choices, [([], 0.0)], []
    keep = max(2, 1 + len(ends)) * width
    assert params.max_tokens is not None
    for length in range(1, params.max_tokens + 1):
        every = []
        for answer, total in running:
            named, logprobs = offers(prompt + answer, keep)
            every += [([*answer, token], total + value) for token, value in zip(named, logprobs, strict=True)]
        best = sorted(every, key=lambda each: -each[1])[:keep]
        is_end = [answer[-1] in ends or length == params.max_tokens for answer, _ in best]
        finished += [
            (a, t, t / length**params.length_penalty) for (a, t), end in zip(best[:width], is_end, strict=False) if end
        ]
        finished = sorted(finished, key=lambda each: -each[2])[:width]
        running = [each for each, end in zip(best, is_end, strict=True) if not end][:width]
        if not running or (len(finished) == width and running[0][1] / length**params.length_penalty <= finished[-1][2]):
            break
    return [(answer, total) for answer, total, _ in finished]


def drive(more: dict[str, Any] | None = None, **settings: Any) -> Driver:
    driver = Driver(**{"block_size": 4, "num_blocks": 400, "eos": frozenset({5, 400}), **settings})
    for prompt in PROMPTS:
        driver.add(prompt, LENGTH, n=WIDTH, use_beam_search=True, **(more or {}))
    if not more:
        driver.add_crowd()
    return driver


def run(driver: Driver) -> list[Request]:
    for _ in range(5000):
        if not driver.scheduler.num_unfinished:
            break
        driver.step()
    driver.check_idle()
    return [request for request in driver.requests if request.beam_search is not None]


def found(request: Request) -> list[list[int]]:
    return [sequence.output_token_ids for sequence in request.sequences]


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 20},
    "recompute": {"num_blocks": 40},
    "swap": {"num_blocks": 40, "preemption": "swap", "num_host_blocks": 40},
    "blocks": {"block_size": 7, "enable_prefix_caching": False, "num_blocks": 60},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_found_is_what_a_plain_search_finds(name: str) -> None:
    driver = drive(**SETTINGS[name])
    requests = run(driver)
    lengths = set()
    for request in requests:
        right = plain_search(list(request.prompt_token_ids), request.params, {5, 400})
        assert found(request) == [answer for answer, _ in right]
        for sequence, (answer, total) in zip(request.sequences, right, strict=True):
            assert sequence.total_logprob == pytest.approx(total)
            stops = answer[-1] in (5, 400)
            assert sequence.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
            lengths.add(len(answer))
    if name in ("recompute", "swap"):
        assert driver.counters.preemptions > 3
    if name == "swap":
        assert driver.counters.preemptions_swap > 0


def test_beams_that_wait_for_others_may_have_to_go() -> None:
    """While a group is computed again some beams come first and name their continuations; if all have to go once more
    that does not count, and others may be first."""
    driver = drive(max_num_batched_tokens=24, max_num_seqs=20)
    residents, num_gone = driver.scheduler._residents, 0
    for step in range(5000):
        if not driver.scheduler.num_unfinished:
            break
        driver.step()
        for request in [r for r in driver.scheduler.running if r.beam_search is not None]:
            some_wait = 0 < len(request.beam_search._offers) < WIDTH
            if request.num_preemptions < 12 and (some_wait or step % 5 == request.index):
                residents.preempt(request, None)
                num_gone += some_wait
    assert num_gone > 5
    for request in run(driver):
        right = plain_search(list(request.prompt_token_ids), request.params, {5, 400})
        assert found(request) == [answer for answer, _ in right]


@pytest.mark.parametrize("after", ["nothing", "copies", "forward"])
def test_a_failed_step_changes_nothing(after: str) -> None:
    def fault(plan: StepPlan, ran: list[Request]) -> StepFailure | None:
        return StepFailure(after=after) if plan.step % 9 == 4 and len(ran) > 1 else None

    driver = drive(fault=fault)
    expected = [found(request) for request in run(drive())]
    assert [found(request) for request in run(driver)] == expected
    assert driver.counters.failed_steps > 2


def test_a_draw_that_fails_ends_its_search_alone() -> None:
    driver = drive()
    bad = driver.requests[1]
    driver.fault = lambda plan, ran: DrawFailure(bad) if plan.step == 6 else None
    requests = run(driver)
    assert bad.error == "the logits are not finite"
    assert {sequence.finish_reason for sequence in bad.sequences} == {FinishReason.ERROR}
    expected = [found(request) for request in run(drive())]
    assert [found(r) for r in requests if r is not bad] == [
        e for r, e in zip(requests, expected, strict=True) if r is not bad
    ]


ALWAYS = {"kv_policy": "h2o", "kv_budget": 12, "kv_trigger": "always", "kv_stride": 4, "kv_prefill_stride": 8}


@pytest.mark.parametrize("settings", [{"num_blocks": 45}, {"max_num_batched_tokens": 20, "max_num_seqs": 16}])
def test_deaths_go_with_the_beams(settings: dict[str, Any]) -> None:
    """What is found under eviction, and what has died, does not depend on the pool, preemption or chunks."""
    roomy, driver = run(drive(ALWAYS)), drive(ALWAYS, **settings)
    requests = run(driver)
    assert [found(request) for request in requests] == [found(request) for request in roomy]
    for one, other in zip(requests, roomy, strict=True):
        assert [s.died_at for s in one.sequences] == [s.died_at for s in other.sequences]
        assert all(len(s.died_at) >= len(s.token_ids) - 12 - 4 - 1 for s in one.sequences)
        assert all(max(s.died_at.values()) <= len(s.token_ids) for s in one.sequences if s.died_at)
    if "num_blocks" in settings:
        assert driver.counters.preemptions > 0


def test_under_pressure_beams_lose_no_more_than_they_may() -> None:
    pressure = ALWAYS | {"kv_trigger": "pressure"}
    driver = drive(pressure, num_blocks=28)
    requests = run(driver)
    assert driver.counters.tokens_evicted_under_pressure > 0
    for request in requests:
        assert request.error is None
        assert all(len(s.token_ids) - len(s.died_at) >= min(12, len(s.token_ids)) for s in request.sequences)


def test_policies_that_look_back_on_queries_are_refused() -> None:
    driver = Driver(block_size=4, num_blocks=400)
    with pytest.raises(RequestError, match="looks back on the queries of one sequence") as caught:
        driver.add(PROMPTS[0], 8, n=4, use_beam_search=True, kv_policy="expected_attention", kv_budget=8)
    assert caught.value.field == "use_beam_search"


# --- the decision, by itself ------------------------------------------------------------------------------------------


def search(**params: Any) -> BeamSearch:
    return BeamSearch(SamplingParams(n=2, use_beam_search=True, **params), max_tokens=10, ends={9})


def offer(beams: BeamSearch, *named: tuple[list[int], list[float]]) -> None:
    for beam, (names, logprobs) in enumerate(named):
        is_last = beams.offer(beam, np.array(names, np.int32), np.array(logprobs))
        assert is_last == (beam == len(named) - 1)


@pytest.mark.parametrize("penalty", [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY])
def test_no_length_is_too_long_for_a_penalty(penalty: float) -> None:
    beams = search(length_penalty=penalty, early_stopping="never")
    scores = [beams.score(-1e9, length) for length in (1, 2, 10_000, MAX_LENGTH)]
    assert np.isfinite(scores).all()
    assert len(set(scores)) == 4


def test_in_the_beginning_one_speaks_for_all() -> None:
    beams = search()
    same = ([1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4])
    offer(beams, same, same)
    ended, running = beams.decide(1)
    assert not ended
    assert [(each.beam, each.token) for each in running] == [(0, 1), (0, 2)]
    assert {beam: each.token for beam, each in beams.assign(running, 1).items()} == {0: 1, 1: 2}


def test_who_has_no_continuation_takes_over() -> None:
    beams = search()
    offer(beams, ([1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4]), ([1, 2, 3, 4], [-5.0, -6.0, -7.0, -8.0]))
    _, running = beams.decide(2)
    heirs = beams.assign(running, 2)
    assert {beam: (each.beam, each.token) for beam, each in heirs.items()} == {0: (0, 1), 1: (0, 2)}


def test_an_end_beyond_the_width_is_passed_over() -> None:
    beams = search()
    offer(beams, ([1, 9, 3, 4], [-0.1, -0.2, -0.3, -0.4]), ([9, 2, 3, 4], [-0.25, -0.5, -0.6, -0.7]))
    ended, running = beams.decide(2)
    assert [(each.beam, each.token) for each in ended] == [(0, 9)]
    assert [(each.beam, each.token) for each in running] == [(0, 1), (0, 3)]
