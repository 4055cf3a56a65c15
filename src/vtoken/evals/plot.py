"""Memory against quality, as a picture. Needs matplotlib, which only the extra `bench` brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vtoken.base.errors import ConfigError
from vtoken.evals.evaluate import Evaluation


def check_plot(path: Path) -> None:
    """Raise ConfigError unless a picture can be drawn into this file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; pip install 'vtoken[bench]'") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"plot: {path.name!r} is no picture; give a name that ends in one of {', '.join(known)}")


def draw(evaluation: Evaluation, path: Path) -> None:
    """Write a plot: MiB really held a sequence on x, the task's first score on y, a line a policy and KV format.

    Raises ConfigError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    task = evaluation.task
    column = task.columns[0]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.add_subplot()
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for outcome in evaluation.outcomes:
        if outcome.retained_bytes is not None:
            point = outcome.retained_bytes / 2**20, outcome.grade.scores[column.name]
            lines.setdefault((outcome.setting.name, outcome.setting.kv_format), []).append(point)
    formats = list(dict.fromkeys(kv_format for _, kv_format in lines))
    for (name, kv_format), points in lines.items():
        points.sort()
        label = name if len(formats) == 1 else f"{name}, {kv_format}"
        style = ("-", "--", ":", "-.")[formats.index(kv_format) % 4]
        axes.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=label)
    axes.axhline(evaluation.full.grade.scores[column.name], color="0.6", linewidth=0.8, zorder=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("MiB of KV blocks held a sequence")
    axes.set_ylabel(f"{column.title} ({column.better} is better)")
    axes.set_title(f"{evaluation.model}: {task.about}", fontsize="small")
    axes.legend(fontsize="small")
    axes.grid(color="0.9")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"plot: {path} cannot be written: {error.strerror or error}") from None
