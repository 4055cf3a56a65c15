"""The whole benchmark, on workloads of a few short texts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from tests.bench.runs import start
from vtoken.base.errors import ConfigError
from vtoken.bench.config import BenchConfig, Place
from vtoken.bench.jobs import Job, Workload
from vtoken.bench.reclaim import NATIVE, ReclaimBench
from vtoken.bench.report import Report, from_json, to_json
from vtoken.policies.registry import resolve_policy

pytestmark = pytest.mark.slow  # minutes: whole matrices on the simulated device

WORKLOADS = (
    Workload("short", "made by hand", tuple(Job(0.0, 30 + 5 * i, 16) for i in range(5))),
    Workload("longer", "made by hand", tuple(Job(0.0, 60 + 5 * i, 16) for i in range(5))),
)


def config(**changes: Any) -> BenchConfig:
    made = BenchConfig(
        place=Place(start, {"device": "h100"}),
        workloads=WORKLOADS,
        policies={name: resolve_policy(name) for name in ("h2o", "random")},
        ratios=(0.4, 0.6),
        block_sizes=(8,),
        is_coarse=True,
        settings={"seed": 0},
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def found() -> Report:
    return ReclaimBench(config()).run()


def test_every_arm_runs_in_every_cell_and_native_once_a_pool(found: Report) -> None:
    runs = [(run.cell.workload, run.cell.policy, run.cell.ratio, run.arm) for run in found.runs]
    assert len(set(runs)) == len(runs)
    matrix = [run for run in runs if run[2] <= 0.6]
    assert sum(arm == "native" for *_, arm in matrix) == 2
    for arm in ("naive", "repack", "vtoken"):
        assert sum(run[3] == arm for run in matrix) == 2 * 2 * 2
    assert {run.cell.policy for run in found.runs if run.arm == "native"} == {NATIVE}


def test_one_more_cell_erases_enough_for_the_largest_published_reduction(found: Report) -> None:
    beyond = [run for run in found.runs if run.cell.ratio == 0.75]
    assert {run.arm for run in beyond} == {"naive", "repack", "vtoken"}
    assert {(run.cell.workload, run.cell.policy) for run in beyond} == {("longer", "random")}


def test_comparisons_are_against_naive_with_the_same_victims(found: Report) -> None:
    assert len(found.comparisons) == 2 * 9
    assert all(one.has_same_victims for one in found.comparisons)
    ours = [one for one in found.comparisons if one.arm == "vtoken"]
    assert all(0 < one.reduction <= one.possible for one in ours)
    assert all(one.floor_blocks <= one.retained_blocks for one in ours)


def test_sweeps_cover_the_first_policy_and_the_larger_ratios(found: Report) -> None:
    cells = {(sweep.cell.workload, sweep.cell.policy, sweep.cell.ratio) for sweep in found.sweeps}
    assert cells == {(w, "h2o", r) for w in ("short", "longer") for r in (0.4, 0.6)}
    for sweep in found.sweeps:
        limits = [point.limit for point in sweep.points]
        assert limits == sorted(set(limits))
        assert sweep.knee in limits
        held = [point for point in sweep.points if point.is_sustained]
        assert sweep.sustained == max((point.limit for point in held), default=0)


def test_vtoken_sustains_more_than_naive(found: Report) -> None:
    sustained = {(sweep.cell, sweep.arm): sweep.sustained for sweep in found.sweeps}
    for (cell, arm), most in sustained.items():
        if arm == "vtoken":
            assert most >= sustained[cell, "naive"]


def test_the_sweep_is_a_runs_throughput_within_the_sla(found: Report) -> None:
    sweep = next(sweep for sweep in found.sweeps if sweep.arm == "vtoken")
    run = next(run for run in found.runs if run.arm == "vtoken" and run.cell == sweep.cell)
    assert run.throughput_within == sweep.throughput_within
    other = next(run for run in found.runs if run.arm == "vtoken" and run.cell.policy == "random")
    assert other.throughput_within in (0.0, other.metrics.throughput)


def test_steady_decode_copies_nothing_while_tokens_die(found: Report) -> None:  # X1
    assert found.steady is not None
    assert found.steady.tokens_evicted > 500
    assert found.steady.bytes_copied == found.steady.tokens_copied == 0


def test_with_the_pool_half_empty_nothing_is_planned(found: Report) -> None:  # V12
    over = found.overhead
    assert over is not None
    assert (over.reclaim_plans, over.tokens_evicted) == (0, 0)
    assert over.peak_held_blocks <= over.num_blocks / 2
    assert len(over.rounds) == 3


def test_each_workload_has_a_picture(found: Report) -> None:
    assert [picture.cell.workload for picture in found.pictures] == ["short", "longer"]
    picture = found.pictures[0]
    assert [line.arm for line in picture.lines] == ["native", "naive", "repack", "vtoken"]
    assert all(abs(sum(shares) - 1) < 1e-4 for shares in picture.occupancy.values())
    assert picture.slots_before is not None
    assert len(picture.slots_before) == picture.cell.num_blocks
    assert all(len(block) == 8 for block in picture.slots_before)


def test_the_report_survives_json(found: Report) -> None:
    assert from_json(to_json(found)) == found


def test_some_arms_alone_can_be_run() -> None:
    one = config(arms=("vtoken",), workloads=WORKLOADS[:1], ratios=(0.5,))
    report = ReclaimBench(one).run()
    assert {run.arm for run in report.runs} == {"vtoken"}
    assert report.comparisons == []
    assert report.overhead is None
    assert {run.throughput_within for run in report.runs} == {None}


def test_progress_counts_settings_and_says_what_runs() -> None:
    class Bar:
        def __init__(self) -> None:
            self.done = 0
            self.said: list[str] = []

        def update(self, n: int = 1) -> None:
            self.done += n

        def set_postfix_str(self, text: str, refresh: bool = True) -> None:
            self.said.append(text)

    bar, totals = Bar(), []

    def make(total: int) -> Any:
        totals.append(total)
        return nullcontext(bar)

    ReclaimBench(config(workloads=WORKLOADS[:1], sweeps=False, probes=False), make).run()
    assert totals == [bar.done] == [5]
    assert "short, h2o, 40% erased, blocks of 8: naive" in bar.said


def test_a_pool_too_small_for_the_longest_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool: 9 blocks of 8 tokens are too few for longer"):
        ReclaimBench(config(num_blocks=9))
