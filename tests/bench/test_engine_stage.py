"""The arms on a real (tiny) model, by the machine's own clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from vtoken.bench.arms import Run, run_arm
from vtoken.bench.engine_stage import EngineStage
from vtoken.bench.jobs import Job
from vtoken.bench.stages import Arm, Setting
from vtoken.policies.registry import resolve_policy

JOBS = tuple(Job(0.0, 24 + 5 * i, 20) for i in range(6))


@pytest.fixture(scope="module")
def runs(model_folder: Callable[[], Path]) -> dict[str, Run]:
    def run(arm: Arm) -> Run:
        setting = Setting(arm, resolve_policy("h2o"), 0.5, block_size=4, num_blocks=36, max_model_len=128)
        return run_arm(setting, JOBS, partial(EngineStage, model=str(model_folder())), seed=1)

    return {arm: run(arm) for arm in ("native", "naive", "repack", "vtoken")}  # type: ignore[arg-type]


def test_the_arms_that_evict_have_the_same_victims(runs: dict[str, Run]) -> None:  # V6
    assert len({runs[arm].metrics.victims for arm in ("naive", "repack", "vtoken")}) == 1
    assert runs["vtoken"].metrics.tokens_erased > 20
    assert runs["native"].metrics.tokens_erased == 0


def test_dead_memory_comes_back(runs: dict[str, Run]) -> None:
    naive, vtoken = runs["naive"].metrics, runs["vtoken"].metrics
    assert vtoken.retained_blocks < naive.retained_blocks
    assert vtoken.beyond_floor_share == 0


def test_time_is_the_machines(runs: dict[str, Run]) -> None:
    for run in runs.values():
        steps = run.recording.steps
        spent = steps["forward"] + steps["copies"] + steps["planning"] + steps["applying"]
        assert 0 < float(spent.sum()) <= run.metrics.seconds
        assert steps["taken"] == pytest.approx(spent)
        assert (steps["copies"] > 0).sum() <= (steps["relocated"] > 0).sum() + run.metrics.preemptions


def test_copies_are_timed_by_themselves(runs: dict[str, Run]) -> None:
    steps = runs["vtoken"].recording.steps
    moved = steps["relocated"] > 0
    assert moved.any()
    assert (steps["copies"][moved] > 0).all()
