"""Eviction by policy at fixed places (`kv_trigger="always"`), on the simulated executor.

Every answer is held to the model of plain numbers with a mask that hides exactly what died, from where it died on
(`Driver.check_outputs`), and the books are checked after every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.driving import Driver, tokens
from vtoken.base.errors import CapacityError, ConfigError, RequestError
from vtoken.policies.registry import resolve_policy
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.retention import RetentionSettings
from vtoken.schedule.sequence import FinishReason, Request

# Their statistics are of all kinds: none, sums, windows, from the cache.
POLICIES = ["random", "h2o", "tova", "snapkv:window=8", "knorm", "keydiff", "scissorhands:window=16", "lagkv:lag=8"]
ALWAYS: dict[str, Any] = {"kv_trigger": "always", "kv_stride": 16, "kv_prefill_stride": 32}


# For an engine whose pool is smaller than its texts.
KEEPS_LITTLE = RetentionSettings(resolve_policy("h2o"), 24, "always", 16, 32)


def deaths(request: Request) -> list[dict[int, int]]:
    return [dict(sequence.died_at) for sequence in request.sequences]


def run_one(policy: str, *, n: int = 1, neighbours: int = 0, **settings: Any) -> tuple[Request, Driver]:
    """One request under eviction, and, if asked for, others beside it."""
    driver = Driver(**{"num_blocks": 200, "block_size": 8, "max_num_batched_tokens": 128, **settings})
    request = driver.add(tokens(150, 1), 60, n=n, temperature=float(n > 1), kv_policy=policy, kv_budget=24, **ALWAYS)
    for i in range(neighbours):
        evicted = {"kv_policy": POLICIES[i], "kv_budget": 16, **ALWAYS} if i % 2 else {}
        driver.add(tokens(20 + 9 * i, 7, i), 60 + i, **evicted)
    driver.run()
    return request, driver


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_die_at_the_places_down_to_the_budget(policy: str) -> None:
    request, _ = run_one(policy)
    [died_at] = deaths(request)
    places = [56, 88, 120, 150, 166, 182, 198]
    assert sorted(set(died_at.values())) == places
    for place in places:
        alive = place - sum(died <= place for died in died_at.values())
        assert alive == 24
    assert all(position < died for position, died in died_at.items())


@pytest.mark.parametrize("policy", ["random", "h2o", "snapkv:window=8", "keydiff"])
@pytest.mark.parametrize(
    "other",
    [
        {"num_blocks": 12, "max_model_len": 300, "retention": KEEPS_LITTLE},
        {"max_num_batched_tokens": 256},
        {"max_num_batched_tokens": 11, "max_num_seqs": 8},
        {"block_size": 5},
        {"neighbours": 6},
        {"neighbours": 6, "num_blocks": 30},  # preempted, and computed again
        {"neighbours": 6, "num_blocks": 30, "num_host_blocks": 30, "preemption": "swap"},
        {"enable_prefix_caching": False},
        {"kv": {"kv_mode": "naive"}},
        {"kv": {"kv_mode": "repack"}},
        {"kv": {"kv_copies": "beside"}},
        {"n": 3},
    ],
    ids=str,
)  # fmt: skip
def test_victims_depend_on_the_request_alone(policy: str, other: Mapping[str, Any]) -> None:
    request, _ = run_one(policy)
    same, driver = run_one(policy, **other)
    if other.get("neighbours") and other.get("num_blocks"):
        assert driver.counters.preemptions > 0
    for died_at in deaths(same)[:1] if "n" not in other else deaths(same):
        prompt_deaths = {p: died for p, died in died_at.items() if died <= 150}
        assert prompt_deaths == {p: died for p, died in deaths(request)[0].items() if died <= 150}
    if "n" not in other:
        assert deaths(same) == deaths(request)
        assert same.sequences[0].output_token_ids == request.sequences[0].output_token_ids


def test_a_warm_prefix_cache_changes_no_victim() -> None:
    for policy in POLICIES:
        driver = Driver(num_blocks=400, block_size=8, max_num_batched_tokens=128)
        cold = driver.add(tokens(150, 1), 40, kv_policy=policy, kv_budget=24, **ALWAYS)
        driver.run()
        full = driver.add(tokens(150, 1), 4)  # fills the cache with the whole prompt
        driver.run()
        warm = driver.add(tokens(150, 1), 40, kv_policy=policy, kv_budget=24, **ALWAYS)
        driver.run()
        assert full.sequences[0].finish_reason is FinishReason.LENGTH
        assert deaths(warm) == deaths(cold), policy
    assert warm.num_cached_tokens > 0, "none was warm"


def test_blocks_never_exceed_the_peaks() -> None:
    driver = Driver(num_blocks=100, block_size=8, max_num_batched_tokens=128)
    request = driver.add(tokens(300, 1), 200, kv_policy="random", kv_budget=24, **ALWAYS)
    while driver.scheduler.num_unfinished:
        driver.step()
        for lane in request.lanes:
            in_prompt = driver.memory.tokens.lengths[lane] < 300
            held = len(driver.memory.table(lane))
            assert held <= (24 + (32 if in_prompt else 16)) / 8 + 1, f"{held} blocks"
    driver.check_outputs()


def test_a_request_whose_peaks_do_not_fit_is_refused_at_once() -> None:
    driver = Driver(num_blocks=6, block_size=8, max_num_batched_tokens=64, max_model_len=2000,
                    retention=RetentionSettings(resolve_policy("h2o"), 16, "always", 8, 16))  # fmt: skip
    driver.add(tokens(1000, 1), 10)
    with pytest.raises(CapacityError, match="kv_budget=100") as error:
        driver.add(tokens(1000, 1), 10, kv_budget=100)
    assert error.value.field == "kv_budget"
    driver.run()


def test_a_length_that_only_a_budget_makes_possible() -> None:
    settings = RetentionSettings(resolve_policy("h2o"), 16, "always", 8, 16)
    Driver(num_blocks=6, block_size=8, max_model_len=100_000, retention=settings)
    with pytest.raises(ConfigError, match="max_model_len=100000 is more than the pool serves"):
        Driver(num_blocks=6, block_size=8, max_model_len=100_000)
    with pytest.raises(ConfigError, match="are enough for 48"):
        Driver(num_blocks=6, block_size=8, max_model_len=100_000, retention=settings, kv={"kv_mode": "naive"})


def test_native_keeps_everything() -> None:
    request, driver = run_one("h2o", kv={"kv_mode": "native"})
    assert deaths(request) == [{}]
    assert driver.memory.counters.tokens_evicted == 0


def test_pinned_tokens_and_protected_ones_stay() -> None:
    driver = Driver(num_blocks=100, block_size=8, max_num_batched_tokens=128)
    request = driver.add(
        tokens(150, 1), 50, kv_policy="random:recent=4,sinks=2", kv_budget=24, kv_pin=[(30, 36), (90, 92)], **ALWAYS
    )
    driver.run()
    [died_at] = deaths(request)
    kept = {*range(30, 36), 90, 91, 0, 1}
    assert not kept & died_at.keys()
    assert all(position < died - 4 for position, died in died_at.items())


def test_a_share_of_the_text() -> None:
    driver = Driver(num_blocks=100, block_size=8, max_num_batched_tokens=128)
    request = driver.add(tokens(100, 1), 61, kv_policy="random", kv_budget=0.5, **ALWAYS)
    driver.run()
    [died_at] = deaths(request)
    for place in (100, 116, 132, 148):
        assert place - sum(died <= place for died in died_at.values()) == place // 2


def test_choices_share_what_the_prompt_kept_and_lose_on_their_own_after_it() -> None:
    request, driver = run_one("h2o", n=3)
    first, second, third = deaths(request)
    assert {p for p, died in first.items() if died <= 150} == {p for p, died in second.items() if died <= 150}
    assert first.keys() & third.keys()
    assert driver.memory.counters.forks == 2


def test_a_policy_that_fails_ends_its_own_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    random = type(resolve_policy("random"))
    score = random.score

    def fails(self: Any, view: Any) -> Any:
        if (view.lengths > 60).any():
            raise ZeroDivisionError("nobody divides by zero")
        return score(self, view)

    monkeypatch.setattr(random, "score", fails)
    driver = Driver(num_blocks=100, block_size=8, max_num_batched_tokens=128)
    bad = driver.add(tokens(50, 1), 60, kv_policy="random", kv_budget=24, **ALWAYS)
    good = driver.add(tokens(20, 2), 20, kv_policy="random", kv_budget=24, **ALWAYS)
    other = driver.add(tokens(20, 3), 40, kv_policy="h2o", kv_budget=24, **ALWAYS)
    driver.run()
    assert bad.sequences[0].finish_reason is FinishReason.ERROR
    assert bad.error is not None
    assert "ZeroDivisionError: nobody divides by zero" in bad.error
    assert "random" in bad.error
    for request in (good, other):
        assert request.sequences[0].finish_reason is FinishReason.LENGTH
        assert request.sequences[0].died_at


@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({"kv_policy": "h2p", "kv_budget": 10}, "kv_policy", "did you mean 'h2o'"),
        ({"kv_policy": "pyramidkv", "kv_budget": 10}, "kv_policy", "layer"),
        ({"kv_policy": "h2o"}, "kv_policy", "kv_budget"),
        ({"kv_budget": 10}, "kv_budget", "kv_policy"),
        ({"kv_policy": "streaming_llm", "kv_budget": 3}, "kv_budget", "too small"),
        ({"kv_policy": "h2o", "kv_budget": 10, "kv_pin": [(0, 99)]}, "kv_pin", "prompt"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_queued(params: dict[str, Any], field: str, message: str) -> None:
    driver = Driver()
    with pytest.raises(RequestError, match=message) as error:
        driver.add(tokens(9, 1), 4, **params)
    assert error.value.field == field
    assert driver.scheduler.num_unfinished == 0
    driver.add(tokens(9, 1), 4)
    driver.requests = driver.requests[-1:]
    driver.run()


def test_the_pools_size_alone_decides_what_a_default_engine_accepts() -> None:
    with pytest.raises(ConfigError, match="more than the pool serves"):
        Driver(num_blocks=4, block_size=4, max_model_len=100)
    assert SchedulerConfig(1, 1, 16).retention.policy is None
