"""The arms on the real scheduler and books."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.bench.runs import JOBS, NUM_BLOCKS, run, setting, start
from vtoken.base.errors import RequestError
from vtoken.bench.arms import ARMS, evicts, run_arm, run_in_turns
from vtoken.bench.jobs import Job
from vtoken.bench.metrics import reduction
from vtoken.bench.slot_map import Cell
from vtoken.policies.registry import resolve_policy

EVICTING = ("naive", "repack", "vtoken")


@pytest.fixture(scope="module")
def runs() -> dict[str, object]:
    return {arm: run(arm, pictures=True) for arm in ARMS}


@pytest.mark.parametrize("policy", ["h2o", "random", "scissorhands:window=8"])
def test_the_arms_that_evict_have_the_same_victims(policy: str) -> None:  # V6
    found = [run(arm, policy=resolve_policy(policy)).metrics for arm in EVICTING]
    assert len({metrics.victims for metrics in found}) == 1
    assert len({metrics.tokens_erased for metrics in found}) == 1
    assert found[0].tokens_erased > 100
    assert max(metrics.preemptions for metrics in found) > 0, "though recomputing made them die twice"


def test_every_arm_answers_every_job_to_its_full_length(runs: dict[str, object]) -> None:
    for arm in ARMS:
        metrics = runs[arm].metrics  # type: ignore[attr-defined]
        assert metrics.tokens_generated == sum(job.num_output_tokens for job in JOBS)
        assert metrics.tokens_computed >= sum(job.num_tokens - 1 for job in JOBS)


def test_what_each_arm_does_with_dead_memory(runs: dict[str, object]) -> None:
    native, naive, repack, vtoken = (runs[arm].metrics for arm in ARMS)  # type: ignore[attr-defined]
    assert (native.tokens_erased, native.tokens_copied, native.blocks_returned) == (0, 0, 0)
    assert native.retained_blocks == pytest.approx(native.floor_blocks), "what it holds, lives"
    assert naive.tokens_copied == 0
    assert repack.tokens_copied > 0
    assert vtoken.retained_blocks < repack.retained_blocks < naive.retained_blocks
    assert vtoken.mean_running > naive.mean_running
    assert vtoken.drained_samples > 0
    assert vtoken.beyond_floor_share == 0  # X6


def test_vtoken_retains_fewer_blocks_for_the_same_victims(runs: dict[str, object]) -> None:
    found = reduction(runs["vtoken"].recording, runs["naive"].recording)  # type: ignore[attr-defined]
    assert found.places > 50
    assert found.retained <= found.floor + 1
    assert found.share > 0.25


def test_the_same_run_twice_is_the_same_but_for_the_hosts_time() -> None:
    first, second = (run("vtoken").metrics for _ in range(2))
    host = {"planner_seconds", "planner_p50", "planner_p95", "apply_p50"}
    assert {k: v for k, v in vars(first).items() if k not in host} == {
        k: v for k, v in vars(second).items() if k not in host
    }


def test_a_recording_agrees_with_the_books(runs: dict[str, object]) -> None:
    steps = runs["vtoken"].recording.steps  # type: ignore[attr-defined]
    assert (np.diff(steps["time"]) > 0).all()
    assert (steps["live"] + steps["holes"] + steps["tail"] == steps["held"] * 8).all()
    assert (steps["floor"] <= steps["held"]).all()
    assert (steps["held"] <= NUM_BLOCKS).all()
    assert steps["drawn"].sum() == sum(job.num_output_tokens for job in JOBS)
    assert steps["is_decode"].any()
    assert not steps["is_decode"].all()
    gaps = runs["vtoken"].recording.token_gaps  # type: ignore[attr-defined]
    assert len(gaps) == sum(job.num_output_tokens - 1 for job in JOBS)


def test_each_place_of_an_answer_is_sampled_once(runs: dict[str, object]) -> None:
    for arm in ARMS:
        samples = runs[arm].recording.samples  # type: ignore[attr-defined]
        places = list(zip(samples["request"].tolist(), samples["length"].tolist(), strict=True))
        assert len(set(places)) == len(places)
        # The first token of an answer comes with its prompt, the last is drawn and never computed.
        assert len(places) >= sum(job.num_output_tokens - 1 for job in JOBS) - runs[arm].metrics.preemptions  # type: ignore[attr-defined]


def test_the_map_shows_what_a_reclaim_gave_back(runs: dict[str, object]) -> None:
    shown = runs["vtoken"].recording.slot_map  # type: ignore[attr-defined]
    assert shown is not None
    assert shown.blocks_returned > 0
    assert shown.before.shape == shown.after.shape == (NUM_BLOCKS, 8)
    held = [int((cells != Cell.FREE).any(axis=1).sum()) for cells in (shown.before, shown.after)]
    assert (shown.before == Cell.DEAD).sum() > (shown.after == Cell.DEAD).sum()
    assert held[1] <= NUM_BLOCKS


def test_a_refilled_queue_keeps_memory_short_until_the_first_round_is_answered() -> None:
    plain, refilled = (
        run_arm(setting("vtoken"), JOBS, start, seed=0, refill=refill).recording.steps for refill in (False, True)
    )
    assert plain["running"][-1] == 1, "the last one runs alone"
    assert refilled["running"][-1] > 2
    assert refilled["is_short"].mean() > plain["is_short"].mean()


def test_victims_are_those_of_the_first_round() -> None:
    plain, naive, refilled = (
        run_arm(setting(arm), JOBS, start, seed=0, refill=refill).metrics  # type: ignore[arg-type]
        for arm, refill in (("vtoken", False), ("naive", True), ("vtoken", True))
    )
    assert plain.victims == naive.victims == refilled.victims
    assert plain.tokens_erased == naive.tokens_erased == refilled.tokens_erased
    assert refilled.tokens_generated > plain.tokens_generated


def test_jobs_are_added_when_they_arrive() -> None:
    jobs = [Job(0.0, 20, 5), Job(100.0, 20, 5)]
    found = run("native", jobs)
    assert found.metrics.peak_running == 1
    assert found.metrics.seconds == pytest.approx(100, abs=1)
    assert found.metrics.first_token_p95 < 1, "an answer's time begins with its arrival"


def test_a_prompt_too_short_for_the_policy_loses_nothing() -> None:
    policy = resolve_policy("streaming_llm")
    short, long = Job(0.0, 6, 20), Job(0.0, 60, 20)
    assert not evicts(policy, 0.5, short)
    assert evicts(resolve_policy("h2o"), 0.5, long)
    found = run("vtoken", [short, long], policy=resolve_policy("streaming_llm:sinks=4,recent=8"))
    assert found.num_spared == 1
    assert found.metrics.tokens_erased > 0


def test_a_job_that_can_never_run_is_refused() -> None:
    with pytest.raises(RequestError, match="leave no room for an answer"):
        run_arm(replace(setting("native"), max_model_len=30), JOBS, start, seed=0)


def test_copies_beside_the_steps_have_the_same_victims() -> None:  # V9
    ordered, beside = (run("vtoken", copies=copies).metrics for copies in ("ordered", "beside"))
    assert beside.victims == ordered.victims
    assert beside.copy_wait_seconds == 0
    assert ordered.copy_wait_seconds > 0


def test_runs_in_turns_are_the_runs_themselves() -> None:
    turns = run_in_turns([setting("native"), setting("vtoken")], JOBS, start, seed=0)
    for arm, found in zip(("native", "vtoken"), turns, strict=True):
        alone = run(arm)  # type: ignore[arg-type]
        assert found.setting.arm == arm
        assert found.metrics.victims == alone.metrics.victims
        assert found.metrics.steps == alone.metrics.steps
        assert found.metrics.seconds == alone.metrics.seconds, "a simulated clock stands still in the others' turns"
