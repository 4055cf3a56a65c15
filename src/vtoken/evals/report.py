"""What came of an evaluation: tables for people, JSON for programs."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

import vtoken
from vtoken.base.units import format_bytes
from vtoken.evals.evaluate import Evaluation, Outcome


def headline(evaluation: Evaluation) -> str:
    """What was run."""
    return f"{evaluation.task.name}: {evaluation.task.about}"


def main_table(evaluation: Evaluation) -> Table:
    """A line a setting; shares are of the full cache in the first format."""
    task, formats = evaluation.task, {outcome.setting.kv_format for outcome in evaluation.outcomes}
    table = Table(box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("budget", justify="right")
    if len(formats) > 1:
        table.add_column("KV")
    for heading in ("retained", "of full", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, column in enumerate(task.columns):
        table.add_column(column.title, justify="right", style="bold" if i == 0 else "")
    table.add_column("seconds", justify="right")
    for outcome in evaluation.outcomes:
        setting = outcome.setting
        table.add_row(
            setting.name,
            "" if setting.budget is None else f"{setting.budget:g}",
            *([setting.kv_format] if len(formats) > 1 else []),
            "-" if outcome.retained_bytes is None else format_bytes(round(outcome.retained_bytes)),
            _share(outcome, evaluation.full),
            f"{outcome.kept:.0%}",
            *(format(outcome.grade.scores[column.name], column.form) for column in task.columns),
            f"{outcome.seconds:.1f}",
        )
    return table


def _share(outcome: Outcome, full: Outcome) -> str:
    if outcome.retained_bytes is None or not full.retained_bytes:
        return "-"
    return f"{outcome.retained_bytes / full.retained_bytes:.0%}"


def cell_tables(evaluation: Evaluation) -> list[tuple[str, Table]]:
    """(setting, table) for each setting of a task with cells: needles found, and nats a token of the answers, by depth
    and length."""
    tables = []
    for outcome in evaluation.outcomes:
        cells = {(cell.depth, cell.length): cell for cell in outcome.grade.cells}
        if not cells:
            continue
        lengths = list(dict.fromkeys(length for _, length in cells))
        table = Table(box=None, pad_edge=False)
        table.add_column("depth", justify="right")
        for length in lengths:
            table.add_column(f"{length:,} tokens", justify="right")
        for depth in dict.fromkeys(depth for depth, _ in cells):
            row = [cells[depth, length] for length in lengths]
            table.add_row(f"{depth:.0%}", *(f"{cell.found}/{cell.tried} ({cell.logprob:.2f})" for cell in row))
        tables.append((str(outcome.setting), table))
    return tables


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Everything that was found out."""
    return {
        "vtoken": vtoken.__version__,
        "model": evaluation.model,
        "task": evaluation.task.name,
        "about": evaluation.task.about,
        "outcomes": [_record(outcome) for outcome in evaluation.outcomes],
    }


def _record(outcome: Outcome) -> dict[str, Any]:
    setting = outcome.setting
    return {
        "policy": None if setting.is_full else setting.name,
        "budget": setting.budget,
        "kv_cache_dtype": setting.kv_format,
        "kv_stride": setting.stride,
        "kv_prefill_stride": setting.prefill_stride,
        "retained_bytes": outcome.retained_bytes,
        "peak_bytes": outcome.peak_bytes,
        "kept": outcome.kept,
        "seconds": outcome.seconds,
        **{name: value if math.isfinite(value) else None for name, value in outcome.grade.scores.items()},
        **({"cells": [vars(cell) for cell in outcome.grade.cells]} if outcome.grade.cells else {}),
    }
