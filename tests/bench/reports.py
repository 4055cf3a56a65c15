"""Reports made by hand."""

from __future__ import annotations

from dataclasses import replace

from vtoken.bench.knee import Point
from vtoken.bench.metrics import RunMetrics
from vtoken.bench.report import (
    Cell,
    Comparison,
    Line,
    OverheadProbe,
    Picture,
    Report,
    RunReport,
    SteadyProbe,
    Sweep,
    WorkloadReport,
)

CELL = Cell("chat", "h2o", 0.5, 16, 100)
METRICS = RunMetrics(
    steps=10,
    seconds=2.0,
    tokens_generated=100,
    tokens_computed=300,
    throughput=50.0,
    decode_p50=0.010,
    decode_p95=0.020,
    token_gap_p50=0.011,
    token_gap_p95=0.031,
    first_token_p50=0.5,
    first_token_p95=0.7,
    tokens_erased=1234,
    partly_used_share=0.25,
    retained_blocks=8.5,
    floor_blocks=8.0,
    retained_over_floor=0.0625,
    blocks_over_floor=1,
    beyond_floor_share=0.0,
    drained_samples=50,
    unused_blocks=0.25,
    peak_held_blocks=99,
    holes_share=0.1,
    tail_share=0.05,
    blocks_returned=77,
    blocks_returned_dead=7,
    tokens_copied=512,
    bytes_copied=64 * 2**20,
    reclaim_plans=9,
    copy_wait_seconds=0.01,
    copy_wait_share=0.005,
    mean_running=6.5,
    peak_running=9,
    unpreempted_running=7,
    preemptions=3,
    planner_seconds=0.02,
    planner_p50=0.0015,
    planner_p95=0.004,
    apply_p50=0.001,
    rungs={"reclaim": 5},
    verdicts={"packed": 4},
    victims="0123456789abcdef",
)


def run(arm: str, cell: Cell = CELL, **metrics: object) -> RunReport:
    return RunReport(cell, arm, replace(METRICS, **metrics), num_spared=0, throughput_within=42.0)


def comparison(cell: Cell = CELL, **changes: object) -> Comparison:
    made = Comparison(
        cell=cell,
        arm="vtoken",
        has_same_victims=True,
        places=100,
        retained_blocks=8.5,
        naive_retained_blocks=16.0,
        floor_blocks=8.0,
        reduction=0.46875,
        possible=0.5,
        ceiling=0.49,
    )
    return replace(made, **changes)


def sweep(arm: str, cell: Cell = CELL, *, sustained: int = 4, within: float = 100.0, p95: float = 0.02) -> Sweep:
    points = [Point(4, 4, 80.0, 0.01, p95, 0), Point(8, 8, 120.0, 0.01, p95, 2)]
    return Sweep(cell, arm, points, sustained, 8, 0.021, within)


PICTURE = Picture(
    cell=CELL,
    lines=[
        Line(arm, [0.0, 1.0, 2.0], [0, 50, 90], [0, 30, 40], [0, 5, 9])
        for arm in ("native", "naive", "repack", "vtoken")
    ],
    occupancy={arm: [1 / 17] * 17 for arm in ("native", "naive", "repack", "vtoken")},
    slots_before=["3222222222222221"] * 70 + ["0" * 16] * 30,
    slots_after=["3" * 16] * 5 + ["0" * 16] * 95,
    blocks_returned=65,
)


def report(**changes: object) -> Report:
    """All that was promised is met."""
    made = Report(
        vtoken="0.0",
        created="2026-01-02T03:04:05+00:00",
        machine={"processor": "A <fast> one"},
        settings={"seed": 1, "model": "m"},
        workloads=[WorkloadReport("chat", "lengths & where they come from", 48, 161.0, 338.0, 2048)],
        runs=[run("native"), run("naive", retained_blocks=16.0), run("vtoken")],
        comparisons=[
            comparison(),
            comparison(replace(CELL, policy="random", ratio=0.75), reduction=0.73, ceiling=0.74),
        ],
        sweeps=[sweep("native", p95=0.03), sweep("naive"), sweep("vtoken", sustained=8, within=140.0)],
        steady=SteadyProbe("h2o", 128, 40, 500, 2000, 0, 0),
        overhead=OverheadProbe("h2o", 200, 90, 0, 0, 0.010, 0.01005, 0.005, 1.0),
        pictures=[PICTURE],
    )
    return replace(made, **changes)
