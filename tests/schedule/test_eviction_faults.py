"""What once stopped an engine under eviction: each of these ended with requests that nobody could run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.driving import Driver, StepFailure, tokens
from vtoken.base.errors import RequestError
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.registry import resolve_policy
from vtoken.policies.statistics import Statistic
from vtoken.schedule import evictor
from vtoken.schedule.retention import RetentionSettings
from vtoken.schedule.sequence import FinishReason


def keeps(policy: str, budget: int, trigger: Any = "pressure", stride: int = 8, prefill_stride: int = 16) -> Any:
    return RetentionSettings(resolve_policy(policy), budget, trigger, stride, prefill_stride)


@pytest.mark.parametrize("policy", ["streaming_llm", "knorm", "h2o"])
@pytest.mark.parametrize("trigger", ["pressure", "always"])
def test_a_cached_beginning_does_not_keep_a_long_prompt_out(policy: str, trigger: str) -> None:
    driver = Driver(num_blocks=12, block_size=8, max_model_len=400, retention=keeps(policy, 32, trigger))
    text = tokens(200, 1)
    driver.add(text[:90], 4)
    driver.run()
    driver.add(text, 4)
    driver.run()
    assert driver.requests[1].sequences[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("policy", "stride"), [("h2o", 48), ("h2o", 40), ("scissorhands:window=40", 40)])
def test_a_policy_that_has_seen_too_little_starts_over(policy: str, stride: int) -> None:
    driver = Driver(num_blocks=12, block_size=8, max_model_len=400, retention=keeps(policy, 32, "pressure", stride, 48))
    request = driver.add(tokens(30, 1), 200)
    driver.run()
    assert request.num_preemptions == 1
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert min(request.sequences[0].died_at.values()) == 96, "what was drawn before it started over stays true"


@pytest.mark.parametrize("num_blocks", [14, 15, 16])
def test_preempted_choices_come_back_in_the_blocks_that_they_had(num_blocks: int) -> None:
    settings = keeps("streaming_llm", 24, "always")
    driver = Driver(num_blocks=num_blocks, block_size=8, max_model_len=400, retention=settings)
    driver.add(tokens(8, 1), 100, kv_budget=1000)
    driver.add(tokens(160, 2), 60, n=2, temperature=1.0)
    driver.run()
    assert driver.counters.preemptions > 0


def test_pins_of_whole_blocks_are_counted_in_whole_blocks() -> None:
    driver = Driver(num_blocks=13, block_size=8, max_model_len=400, retention=keeps("paged_eviction", 64))
    with pytest.raises(RequestError, match="64 tokens are too few for 120 kept by pins"):
        driver.add(tokens(120, 1), 20, kv_pin=[(i, i + 1) for i in range(0, 120, 8)])
    driver.add(tokens(120, 1), 20, kv_pin=[(i, i + 1) for i in range(0, 32, 8)])
    driver.run()


def test_many_pins_are_as_good_as_few() -> None:
    settings = RetentionSettings(pins=((3, 9), (0, 5), (20, 22)) * 100_000)
    found = settings.resolve(keeps("random", 64), 16)
    assert found is not None
    assert found.pins == ((0, 9), (20, 22))


def test_a_stride_beyond_all_texts() -> None:
    driver = Driver(num_blocks=40, block_size=8)
    driver.add(tokens(20, 1), 40, kv_policy="h2o", kv_budget=10, kv_trigger="always", kv_stride=2**31 - 1)
    driver.add(tokens(20, 2), 40)
    driver.run()


@dataclass(frozen=True)
class Failing(Policy):
    name: ClassVar[str] = "failing"
    source: ClassVar[str] = "a test"
    needs: ClassVar[tuple[Statistic, ...]] = ()
    error: ClassVar[type[BaseException]] = ValueError
    left: ClassVar[int] = 0  # how often it fails before it works

    def score(self, view: TokenView) -> np.ndarray:
        if Failing.left:
            Failing.left -= 1
            raise Failing.error("on purpose")
        return view.positions.astype(float)


@pytest.mark.parametrize("settings", [{}, {"on_pressure": "preempt"}], ids=str)
@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("trigger", ["pressure", "always"])
def test_a_policy_that_fails_ends_its_request_alone(
    trigger: str, error: type[BaseException], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(Failing, "left", 10**6)
    driver = Driver(num_blocks=15, block_size=8, max_model_len=400, retention=keeps("random", 24), kv=settings)
    bad = driver.add(tokens(40, 1), 120, kv_policy=Failing(), kv_budget=24, kv_trigger=trigger)
    good = driver.add(tokens(20, 2), 30)
    driver.run()
    assert bad.sequences[0].finish_reason is FinishReason.ERROR
    assert "failing" in (bad.error or "")
    assert good.sequences[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("trigger", ["pressure", "always"])
def test_ctrl_c_in_a_policy_undoes_the_step(trigger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "error", KeyboardInterrupt)

    def run(interruptions: int) -> tuple[Driver, int]:
        monkeypatch.setattr(Failing, "left", interruptions)
        driver = Driver(num_blocks=15, block_size=8, max_num_batched_tokens=48)
        driver.add(tokens(40, 1), 60, kv_policy=Failing(), kv_budget=24, kv_trigger=trigger, kv_stride=8)
        driver.add(tokens(20, 2), 30)
        caught = 0
        while driver.scheduler.num_unfinished:
            try:
                driver.step()
            except KeyboardInterrupt as error:
                caught += 1
                if driver.scheduler._flight is not None:
                    driver.scheduler.fail(error)  # as the engine does
        driver.check_idle()
        return driver, caught

    undisturbed, _ = run(0)
    driver, caught = run(3)
    assert caught == 3
    if trigger == "always":
        assert driver.outputs == undisturbed.outputs
        assert driver.requests[0].sequences[0].died_at == undisturbed.requests[0].sequences[0].died_at


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("after", ["nothing", "forward"])
def test_a_failed_step_moves_no_death(failing: int, after: str) -> None:
    """A place that was reached in a step which did not take place is not settled."""

    def run(failing: int | None) -> list[list[dict[int, int]]]:
        fails = lambda plan, ran: StepFailure(after=after) if plan.step == failing else None  # noqa: E731
        driver = Driver(num_blocks=24, block_size=8, retention=keeps("knorm", 24, "always", 16), fault=fails)
        for number, length in enumerate([61, 20, 50]):
            driver.add(tokens(length, number), 40)
        driver.run()
        return [[sequence.died_at for sequence in request.sequences] for request in driver.requests]

    undisturbed = run(None)
    found = run(failing)
    assert all(a == b for a, b in zip(found, undisturbed, strict=True) if a != [{}])


def test_a_lane_that_waits_for_blocks_leaves_its_turn_to_copy_to_another() -> None:
    """Copies beside the steps: of choices that share a block one may write there, if the others copy it."""
    settings = keeps("knorm", 32, stride=16)
    driver = Driver(num_blocks=21, block_size=8, retention=settings, enable_prefix_caching=False, beside_delay=1,
                    kv={"kv_copies": "beside"})  # fmt: skip
    for number, (length, n, max_tokens) in enumerate([(100, 1, 40), (61, 3, 20), (61, 1, 40)]):
        driver.add(tokens(length, number), max_tokens, n=n, temperature=1.0)
    driver.run()


@pytest.mark.parametrize("after", ["nothing", "copies", "forward"])
def test_copies_of_a_failed_step_are_heard_of(after: str) -> None:
    """The executor never got them, or their end was told in a result that was lost: their cells come back."""
    driver: Driver

    def fails(plan: object, ran: object) -> StepFailure | None:
        nonlocal count
        count -= bool(driver.memory.moves)
        return StepFailure(after=after) if count == 0 and driver.memory.moves else None

    count = 2
    driver = Driver(num_blocks=16, block_size=8, retention=keeps("streaming_llm", 24, "pressure", 16), beside_delay=2,
                    kv={"kv_copies": "beside"}, fault=fails)  # fmt: skip
    for number, length in enumerate([61, 20, 50]):
        driver.add(tokens(length, number), 30)
    driver.run()
    assert driver.counters.failed_steps > 0


def test_policies_and_statistics_that_nobody_uses_are_forgotten() -> None:
    driver = Driver(num_blocks=60, block_size=8)
    for number in range(2 * evictor.MANY):
        driver.add(tokens(20, number), 3, kv_policy=f"scissorhands:window={number + 8}", kv_budget=400, kv_stride=200)
        if number % 3 == 0:
            driver.run()
    driver.run()
    assert len(driver.scheduler._evictor.policies) <= evictor.MANY
    assert len(driver.memory.tokens.columns) <= evictor.MANY


def test_what_cannot_run_after_all_ends_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours, planted: a request that can never start."""
    driver = Driver(num_blocks=12, block_size=8, checks=False)
    residents = driver.scheduler._residents
    start = residents._start
    monkeypatch.setattr(residents, "_start", lambda request, batch: request.index != 1 and start(request, batch))
    requests = [driver.add(tokens(20, number), 10) for number in range(3)]
    driver.run()
    assert [request.sequences[0].finish_reason.value for request in requests] == ["length", "error", "length"]
    assert "a bug of vtoken" in (requests[1].error or "")
    assert driver.counters.given_up == 1
    assert "request 1 ends" in caplog.text


@pytest.mark.parametrize("policy", ["tova", "knorm", "h2o"])
@pytest.mark.parametrize("length", [48, 60, 63, 64])
def test_a_prompt_that_is_cached_whole_when_it_starts_over(policy: str, length: int) -> None:
    """It is computed again, not matched, or its policy would see no more than before."""
    driver = Driver(num_blocks=4, block_size=16, max_model_len=400, retention=keeps(policy, 16, stride=16))
    driver.add(tokens(length, 1), 40)
    driver.run()
    driver.add(tokens(length, 1), 40)
    driver.add(tokens(10, 2), 5)
    driver.run()
    assert {request.sequences[0].finish_reason for request in driver.requests} == {FinishReason.LENGTH}


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("num_bad", [1, 2, 3])
def test_policies_that_fail_while_their_requests_have_to_go(
    num_bad: int, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "left", 10**6)
    memory: dict[str, Any] = {"num_host_blocks": 20, "preemption": "swap"} if swaps else {}
    driver = Driver(num_blocks=8, block_size=8, max_model_len=400, retention=keeps("random", 16), **memory)
    bad = [driver.add(tokens(20, n), 60, kv_policy=Failing(), kv_budget=16) for n in range(num_bad)]
    good = driver.add(tokens(12, 9), 20)
    driver.run()
    for request in bad:
        assert request.sequences[0].finish_reason is FinishReason.ERROR
        assert "on purpose" in (request.error or "")
    assert good.sequences[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_memory_that_runs_out_in_apply_moves_no_death(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(failing: int) -> tuple[list[Any], int]:
        driver = Driver(num_blocks=40, block_size=4, retention=keeps("streaming_llm", 16, "always", 4))
        for number in range(2):
            driver.add(tokens(30, number), 16)
        reclaim, calls = driver.memory.reclaim, 0

        def short(*args: Any, **settings: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise MemoryError("no more")
            return reclaim(*args, **settings)

        monkeypatch.setattr(driver.memory, "reclaim", short)
        caught = 0
        while driver.scheduler.num_unfinished:
            try:
                driver.step()
            except MemoryError as error:
                caught += 1
                driver.scheduler.fail(error)
        driver.check_idle()
        return [request.sequences[0].died_at for request in driver.requests], caught

    undisturbed, _ = run(0)
    assert run(failing) == (undisturbed, 1)


def test_a_thousand_that_cannot_run_end_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(num_blocks=12, block_size=8, checks=False)
    monkeypatch.setattr(driver.scheduler._residents, "_start", lambda request, batch: False)
    for number in range(1500):
        driver.add(tokens(5, number), 2)
    assert driver.step() is None
    assert driver.counters.given_up == 1500


def test_what_the_cache_gave_was_not_observed() -> None:
    """Under pressure a policy of attention decides when it has seen a stride of queries, cached tokens or not."""

    def victims(*, cached: bool) -> dict[int, int]:
        driver = Driver(num_blocks=8, block_size=16, max_model_len=400, retention=keeps("h2o", 32, stride=64),
                        max_num_batched_tokens=256, enable_prefix_caching=cached)  # fmt: skip
        for _ in range(2):
            request = driver.add(tokens(127, 1), 60)
            driver.run()
        return dict(request.sequences[0].died_at)

    assert victims(cached=True) == victims(cached=False)
