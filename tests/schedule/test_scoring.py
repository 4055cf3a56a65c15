"""Which tokens are scored, and that a score is that of the token's own context, whatever happens on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.driving import Driver, tokens
from vtoken.base.errors import EngineError, RequestError
from vtoken.policies.h2o import H2O
from vtoken.schedule.plan import NO_SCORES
from vtoken.schedule.retention import Retention, RetentionSettings
from vtoken.schedule.sequence import FinishReason, Request

ALWAYS = {
    "kv_policy": H2O(),
    "kv_budget": 24,
    "kv_trigger": "always",
    "kv_stride": 8,
    "kv_prefill_stride": 16,
}


def scored(
    prompts: list[list[int]], more: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[Request], Driver]:
    """Requests that ask for scores, all at once, run to their end."""
    driver = Driver(**{"block_size": 4, "num_blocks": 400, **settings})
    requests = [driver.add(prompt, 6, prompt_logprobs=0, **(more or {})) for prompt in prompts]
    driver.run()
    return requests, driver


def values(request: Request) -> list[float]:
    assert request.prompt_scores is not None
    return request.prompt_scores.logprobs.tolist()


PROMPTS = [tokens(length, i) for i, length in enumerate([70, 1, 2, 45, 61, 33])]


def test_every_token_but_the_first_is_scored_once() -> None:
    driver = Driver(block_size=4, num_blocks=400, max_num_batched_tokens=48, keep_plans=True)
    request = driver.add(PROMPTS[0], 6, prompt_logprobs=0)
    silent = driver.add(PROMPTS[3], 6)
    driver.run()
    found = []
    for plan in driver.plans:
        slices = np.searchsorted(plan.starts, plan.scoring.after, side="right") - 1
        assert set(plan.lanes[slices].tolist()) <= {0}
        found += list(zip(plan.positions[plan.scoring.after] + 1, plan.scoring.targets, strict=True))
    assert found == list(enumerate(PROMPTS[0]))[1:]
    assert np.isnan(values(request)[0])
    assert not np.isnan(values(request)[1:]).any()
    assert silent.prompt_scores is None


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    [request], _ = scored([[5]])
    np.testing.assert_equal(values(request), [np.nan])


@pytest.mark.parametrize("more", [{}, ALWAYS], ids=["kept", "evicted"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 11, "max_num_seqs": 4},
        {"num_blocks": 34},
        {"num_blocks": 34, "preemption": "swap", "num_host_blocks": 100},
        {"block_size": 7, "enable_prefix_caching": False},
    ],
    ids=["chunks", "recompute", "swap", "blocks"],
)
def test_scores_depend_on_the_text_alone(settings: dict[str, Any], more: dict[str, Any]) -> None:
    alone = [values(scored([prompt], more)[0][0]) for prompt in PROMPTS]
    requests, driver = scored(PROMPTS, more, **settings)
    np.testing.assert_equal([values(request) for request in requests], alone)
    if settings.get("num_blocks") == 34 and not more:
        assert driver.scheduler.counters.preemptions > 0


def test_what_is_cached_is_computed_again() -> None:
    driver = Driver(block_size=4, num_blocks=400)
    driver.add(PROMPTS[0], 6)
    driver.run()
    request = driver.add(PROMPTS[0], 6, prompt_logprobs=0)
    driver.run()
    assert request.num_cached_tokens == 0
    np.testing.assert_equal(values(request), values(scored([PROMPTS[0]])[0][0]))
    # Others may go on from what it has computed.
    follower = driver.add(PROMPTS[0], 6)
    driver.run()
    assert follower.num_cached_tokens == 68


def test_choices_share_the_scores_of_their_prompt() -> None:
    [request], _ = scored([PROMPTS[0]], {"n": 3})
    np.testing.assert_equal(values(request), values(scored([PROMPTS[0]])[0][0]))


def test_the_dead_do_not_count() -> None:
    [kept], _ = scored([PROMPTS[0]])
    [request], _ = scored([PROMPTS[0]], ALWAYS)
    first = min(request.sequences[0].died_at.values())
    assert first == 40
    assert values(request)[1 : first + 1] == values(kept)[1 : first + 1]  # drawn from the query before the death
    assert all(a != b for a, b in zip(values(request)[first + 1 :], values(kept)[first + 1 :], strict=True))


def test_logits_that_are_no_numbers_end_their_request_alone() -> None:
    driver = Driver(block_size=4, num_blocks=400)
    request, other = (driver.add(prompt, 6, prompt_logprobs=0) for prompt in (PROMPTS[0], PROMPTS[3]))
    while driver.scheduler.num_unfinished:
        plan = driver.scheduler.schedule()
        assert plan is not None
        result = driver.executor.execute(plan)
        bad = np.where(plan.scoring.targets == PROMPTS[0][5], np.nan, result.scores.logprobs)
        driver.scheduler.apply(replace(result, scores=replace(result.scores, logprobs=bad)))
    assert request.sequences[0].finish_reason is FinishReason.ERROR
    assert "NaN or infinite" in (request.error or "")
    assert other.error is None
    assert len(other.sequences[0].output_token_ids) == 6


def test_a_result_without_the_scores_is_refused() -> None:
    driver = Driver(block_size=4, num_blocks=400)
    driver.add(PROMPTS[0], 6, prompt_logprobs=0)
    plan = driver.scheduler.schedule()
    assert plan is not None
    result = driver.executor.execute(plan)
    with pytest.raises(EngineError, match="scores 64 known tokens and 0 drawn ones, its result has 0 and 0"):
        driver.scheduler.apply(replace(result, scores=NO_SCORES))


# --- an answer that is known ------------------------------------------------------------------------------------------


def test_after_kv_prompt_end_tokens_die_as_in_an_answer_that_is_drawn() -> None:
    prompt = PROMPTS[0]
    driver = Driver(block_size=4, num_blocks=400)
    drawn = driver.add(prompt, 40, **ALWAYS)
    driver.run()
    [answer] = drawn.sequences
    known = driver.add(answer.token_ids[:-1], 1, prompt_logprobs=0, kv_prompt_end=len(prompt), **ALWAYS)
    whole = driver.add(answer.token_ids[:-1], 1, prompt_logprobs=0, **ALWAYS)
    driver.run()
    length = len(answer.token_ids) - 1
    expected = {position: died for position, died in answer.died_at.items() if died < length}
    assert {p: died for p, died in known.sequences[0].died_at.items() if died < length} == expected
    assert known.sequences[0].output_token_ids == answer.token_ids[-1:]
    assert whole.sequences[0].died_at != known.sequences[0].died_at


@pytest.mark.parametrize("prefill_stride", [0, 16])
def test_places_are_those_of_a_prompt_that_ends_there(prefill_stride: int) -> None:
    plain = Retention(H2O(), 24, "always", 8, prefill_stride)
    cut = replace(plain, prompt_end=40)
    for length in range(90):
        assert cut.next_place(length, min(length, 30), 70) == plain.next_place(length, min(length, 30), 40)
    assert cut.peak_in_prompt(70) == max(plain.peak_in_prompt(40), plain.peak_after_prompt(70))
    assert cut.peak_in_prompt(40) == plain.peak_in_prompt(40)
    assert cut.most_matched(70) == plain.most_matched(40)


def test_kv_prompt_end_counts_what_lives_in_the_answer_too() -> None:
    """At the end of the prompt only: 40 tokens at once, then 24 + 8; so 11 blocks of 4 hold a text of 70."""
    at_the_end = ALWAYS | {"kv_prefill_stride": 0, "kv_prompt_end": 40}
    settings = RetentionSettings(H2O(), 24, "always", 8, 8)  # so that longer texts than the pool are served at all
    [request], driver = scored([PROMPTS[0]], at_the_end, num_blocks=11, max_model_len=80, retention=settings)
    assert request.error is None
    assert driver.scheduler.counters.peak_held_blocks <= 11


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kv_prompt_end": 10}, "kv_prompt_end: has no effect without a kv_policy"),
        (ALWAYS | {"kv_prompt_end": 71}, "kv_prompt_end: 71 goes past the prompt, which has 70 tokens"),
    ],
)
def test_an_end_that_cannot_be_is_refused(params: dict[str, Any], message: str) -> None:
    driver = Driver(block_size=4, num_blocks=400)
    with pytest.raises(RequestError, match=message):
        driver.add(PROMPTS[0], 6, **params)
