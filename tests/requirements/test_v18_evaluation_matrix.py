"""V18: the evaluation matrix: three model shapes, ShareGPT- and LongBench-type work, H2O, Random and Scissorhands,
eviction ratios from 0.3 to 0.7, block sizes 16, 32 and 48, within a pool and an SLA that are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vtoken.bench.config import BenchConfig
from vtoken.bench.configure import Asked, configure
from vtoken.bench.reclaim import ReclaimBench
from vtoken.bench.shapes import SHAPES
from vtoken.bench.targets import SLA

POLICIES = ("h2o", "random", "scissorhands:window=16,recent=2")


def small(shape: str, workload: str, block_size: int) -> BenchConfig:
    """All policies and both ends of the ratios, on a few short texts."""
    config = configure(
        Asked(
            workloads=(workload,),
            policies=POLICIES,
            ratios=(0.3, 0.7),
            block_sizes=(block_size,),
            shape=shape,
            limit=5,
            scale={"chat": 0.1, "long": 0.02}[workload],
            sweeps=False,
        )
    )
    return replace(config, probes=False)


def test_the_whole_matrix_is_what_is_measured_by_default() -> None:
    config = configure(Asked())
    assert {workload.name for workload in config.workloads} >= {"chat", "long"}
    assert {name.partition(":")[0] for name in config.policies} == {"h2o", "random", "scissorhands"}
    assert (min(config.ratios), max(config.ratios)) == (0.3, 0.7)
    assert config.block_sizes == (16, 32, 48)
    assert config.arms == ("native", "naive", "repack", "vtoken")
    assert {"mistral-7b", "llama-3.1-8b", "qwen2.5-14b"} <= set(SHAPES)
    assert SLA == 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "workload", "block_size"),
    [("mistral-7b", "chat", 16), ("llama-3.1-8b", "long", 32), ("qwen2.5-14b", "chat", 48)],
)
def test_every_setting_of_the_matrix_runs_in_all_arms(shape: str, workload: str, block_size: int) -> None:
    report = ReclaimBench(small(shape, workload, block_size)).run()
    runs = [run for run in report.runs if run.cell.ratio in (0.3, 0.7)]
    assert {(run.cell.policy, run.cell.ratio, run.arm) for run in runs} == {
        (policy, ratio, arm) for policy in POLICIES for ratio in (0.3, 0.7) for arm in ("naive", "repack", "vtoken")
    }
    assert all(run.metrics.peak_held_blocks <= run.cell.num_blocks for run in runs)
    assert all(run.throughput_within is not None for run in runs)
    assert all(one.has_same_victims for one in report.comparisons)
    assert all(run.metrics.beyond_floor_share == 0 for run in runs if run.arm == "vtoken")
