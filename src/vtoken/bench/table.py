"""The figures of a report as rows of text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from vtoken.base.units import format_bytes
from vtoken.bench.report import RunReport, TargetReport

# The first five say which run, the rest what came of it; blocks are those of a request, in the mean.
HEADINGS: Final = (
    "workload",
    "policy",
    "arm",
    "erased",
    "block",
    "tokens erased",
    "partly used",
    "blocks",
    "floor",
    "over floor",
    "returned",
    "copied",
    "preempts",
    "at once",
    "p95 ms",
    "gap p95 ms",
    "tokens/s",
    "within SLA",
    "copy wait",
    "planning ms",
)


def run_rows(runs: Iterable[RunReport]) -> list[tuple[str, ...]]:
    """One row a run, in the order of `HEADINGS`."""
    return [_row(run) for run in runs]


def _row(run: RunReport) -> tuple[str, ...]:
    cell, metrics = run.cell, run.metrics
    return (
        cell.workload,
        cell.policy,
        run.arm,
        f"{cell.ratio:.0%}",
        str(cell.block_size),
        f"{metrics.tokens_erased:,}",
        f"{metrics.partly_used_share:.0%}",
        f"{metrics.retained_blocks:.2f}",
        f"{metrics.floor_blocks:.2f}",
        f"{metrics.retained_over_floor:+.1%}",
        f"{metrics.blocks_returned:,}",
        format_bytes(metrics.bytes_copied),
        f"{metrics.preemptions:,}",
        f"{metrics.mean_running:.1f}/{metrics.peak_running}",
        f"{metrics.decode_p95 * 1e3:.2f}",
        f"{metrics.token_gap_p95 * 1e3:.2f}",
        f"{metrics.throughput:,.0f}",
        "-" if run.throughput_within is None else f"{run.throughput_within:,.0f}",
        f"{metrics.copy_wait_share:.2%}",
        f"{metrics.planner_p50 * 1e3:.2f}",
    )


# For whoever reads the table alone; docs/bench.md says it in full.
LEGEND: Final = (
    "blocks, floor: that a request holds, and the least for its live tokens (over floor: how much more); partly used: "
    "share of held blocks with some cells live and some not; at once: requests, mean/most; p95: of a step in which all "
    "decode; gap p95: from one token of an answer to the next; within SLA: tokens/s with p95 up to 1.05 x native's"
)


def show_value(value: float | None, unit: str, more: int = 0) -> str:
    """A target's figure: `"27.2 %"`, `"1.37 x"`, `"0 B"`, or a dash for what was not measured; `more` digits."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{value * 100:.{(1 if abs(value) >= 0.1 else 2) + more}f} %"
    if unit == "bytes":
        return format_bytes(int(value))
    return f"{value:.{2 + more}f} {unit}"


def show_pair(target: TargetReport) -> tuple[str, str]:
    """(wanted, measured), with as many digits as it takes to tell them apart."""
    for more in range(4):
        wanted, measured = (show_value(value, target.unit, more) for value in (target.wanted, target.measured))
        if wanted != measured or target.wanted == target.measured:
            break
    return wanted, measured
