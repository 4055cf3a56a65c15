"""The report for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vtoken.bench.report import Report, RunReport
from vtoken.bench.table import HEADINGS, run_rows, show_value

NARROWEST = 132  # columns of a line where no terminal says how many there are

_STYLES = {"met": "green", "missed": "bold red", "not measured": "dim"}
_NUM_NAMES = 5  # columns that say which run it is
_WIDTH = 8  # of a column of figures, and those that differ
_WIDTHS = {"partly used": 7, "blocks": 7, "floor": 7, "returned": 9, "copied": 10, "preempts": 9, "at once": 9}
_WIDTHS |= {"tokens/s": 9, "copy wait": 7, "planning ms": 9}


def tables(report: Report) -> RenderableType:
    """All runs, the sweeps and the targets."""
    parts: list[RenderableType] = [*_runs(report.runs), Text()]
    if report.sweeps:
        parts += [_sweeps(report), Text()]
    return Group(*parts, _targets(report))


def _runs(runs: list[RunReport]) -> Iterator[RenderableType]:
    """A small table a setting: its name would make a column too wide."""
    yield Text("All runs", style="italic")
    for cell, same in groupby(runs, key=lambda run: run.cell):
        name = f"{cell.workload}, nothing evicted, blocks of {cell.block_size}" if not cell.ratio else str(cell)
        yield Text(name, style="bold")
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", width=7)
        for heading in HEADINGS[_NUM_NAMES:]:
            table.add_column(heading, justify="right", width=_WIDTHS.get(heading, _WIDTH), header_style="dim")
        for row in run_rows(same):
            table.add_row(row[2], *row[_NUM_NAMES:])
        yield table


def _sweeps(report: Report) -> Table:
    table = Table(title="Limits on the requests at once", title_justify="left", box=None, pad_edge=False)
    for heading in ("setting", "arm"):
        table.add_column(heading)
    for heading in ("most without preemption", "knee", "most tokens/s", "within the SLA"):
        table.add_column(heading, justify="right")
    for sweep in report.sweeps:
        table.add_row(
            str(sweep.cell),
            sweep.arm,
            str(sweep.sustained),
            str(sweep.knee),
            f"{max(point.throughput for point in sweep.points):,.0f}",
            f"{sweep.throughput_within:,.0f}",
        )
    return table


def _targets(report: Report) -> Table:
    table = Table(title="Targets", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("wanted", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("where, and why", style="dim")
    for target in report.targets:
        table.add_row(
            f"{target.name} ({target.requirement})",
            show_value(target.wanted, target.unit),
            show_value(target.measured, target.unit),
            Text(target.verdict, style=_STYLES[target.verdict]),
            ": ".join(part for part in (target.where, target.why) if part),
        )
    return table


def show(report: Report, console: Console) -> None:
    """Print it; wider than a narrow pipe, so that a file gets whole lines."""
    if not console.is_terminal:
        console = Console(file=console.file, width=NARROWEST)
    console.print(tables(report))
