"""The report for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vtoken.bench.report import Report, RunReport, TargetReport
from vtoken.bench.table import HEADINGS, LEGEND, run_rows, show_pair
from vtoken.bench.targets import counted

NARROWEST = 132  # columns of a line where no terminal says how many there are

_STYLES = {"met": "green", "missed": "bold red", "not allowed here": "dim", "not decided": "yellow"}
_NUM_NAMES = 5  # columns that say which run it is
_ARM = HEADINGS.index("arm")


def tables(report: Report, width: int = NARROWEST) -> RenderableType:
    """All runs, the sweeps and the targets."""
    parts: list[RenderableType] = [*_runs(report.runs, width), Text()]
    if report.sweeps:
        parts += [_sweeps(report), Text()]
    return Group(*parts, *_targets(report.targets))


def _runs(runs: list[RunReport], width: int) -> Iterator[RenderableType]:
    """A small table a setting: its name would make a column too wide."""
    yield Text("All runs", style="italic")
    yield Text(LEGEND, style="dim")
    rows = run_rows(runs)
    # As wide as the longest figure or word of the heading, so that no cell breaks.
    widths = [
        max(len(text) for text in (*heading.split(), *(row[i] for row in rows))) for i, heading in enumerate(HEADINGS)
    ]
    parts = _parts(widths, width)
    for cell, same in groupby(zip(runs, rows, strict=True), key=lambda pair: pair[0].cell):
        name = f"{cell.workload}, nothing evicted, blocks of {cell.block_size}" if not cell.ratio else str(cell)
        yield Text(name, style="bold")
        some = [row for _, row in same]
        for columns in parts:
            table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
            table.add_column("", width=widths[_ARM], no_wrap=True)
            for i in columns:
                table.add_column(HEADINGS[i], justify="right", width=widths[i], header_style="dim")
            for row in some:
                table.add_row(row[_ARM], *(row[i] for i in columns))
            yield table


def _parts(widths: list[int], width: int) -> list[list[int]]:
    """The columns of figures, in as many tables as the width makes necessary."""
    parts: list[list[int]] = [[]]
    left = width - widths[_ARM] - 1
    for i in range(_NUM_NAMES, len(HEADINGS)):
        if widths[i] + 1 > left and parts[-1]:
            parts.append([])
            left = width - widths[_ARM] - 1
        parts[-1].append(i)
        left -= widths[i] + 1
    return parts


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


def _targets(targets: list[TargetReport]) -> Iterator[RenderableType]:
    """Those that were measured; the others in one line."""
    measured = [target for target in targets if target.verdict != "not measured"]
    yield Text(f"Targets: {counted(measured)}", style="italic")
    table = Table(box=None, pad_edge=False, show_header=bool(measured))
    table.add_column("what")
    table.add_column("wanted", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("where, and why", style="dim")
    for target in measured:
        table.add_row(
            target.name,
            *show_pair(target),
            Text(target.verdict, style=_STYLES[target.verdict]),
            ": ".join(part for part in (target.where, target.why) if part),
        )
    if measured:
        yield table
    if len(measured) < len(targets):
        yield Text(f"{len(targets) - len(measured)} more need settings that did not run here", style="dim")


def show(report: Report, console: Console) -> None:
    """Print it; wider than a narrow pipe, so that a file gets whole lines."""
    if not console.is_terminal:
        console = Console(file=console.file, width=NARROWEST)
    console.print(tables(report, console.width))
