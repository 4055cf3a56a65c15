"""The plots of the report, drawn by matplotlib (extra `bench`) and returned as PNG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vtoken.base.errors import ConfigError
from vtoken.bench.report import Picture, Sweep
from vtoken.bench.slot_map import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS: Final = {"native": "#7a7f87", "naive": "#d1495b", "repack": "#e0a030", "vtoken": "#1f7a8c"}
_CELL_COLOURS: Final = {Cell.FREE: "#f4f4f2", Cell.TAIL: "#dcdfe3", Cell.DEAD: "#e9a6ae", Cell.LIVE: "#1f7a8c"}
_CELL_NAMES: Final = {Cell.FREE: "free block", Cell.TAIL: "for tokens to come", Cell.DEAD: "dead", Cell.LIVE: "live"}
_BLOCKS_A_LINE: Final = 64
_DOTS_PER_INCH: Final = 110


def check_matplotlib() -> None:
    """Raise ConfigError, naming the extra, where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a report with plots needs matplotlib, which is not installed: pip install 'vtoken[bench]', or leave "
            "--html out"
        ) from None


def retained_over_time(picture: Picture) -> bytes:
    """Blocks a running request retains, arm by arm, and what its live tokens need."""
    figure, axes = _figure(7.2, 3.2)
    for line in picture.lines:
        running = np.maximum(np.array(line.running), 1)
        axes.plot(line.seconds, np.array(line.held) / running, color=COLOURS[line.arm], label=line.arm, linewidth=1.4)
    floor = next((line for line in reversed(picture.lines) if line.arm != "native"), picture.lines[-1])
    running = np.maximum(np.array(floor.running), 1)
    axes.plot(
        floor.seconds, np.array(floor.floor) / running, color="black", linestyle=":", linewidth=1, label="floor of "
        f"{floor.arm}"
    )  # fmt: skip
    axes.set_xlabel("seconds")
    axes.set_ylabel("blocks a running request")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=5, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _png(figure)


def running_over_time(picture: Picture) -> bytes:
    """Requests that run at once."""
    figure, axes = _figure(7.2, 2.4)
    for line in picture.lines:
        axes.step(line.seconds, line.running, color=COLOURS[line.arm], label=line.arm, linewidth=1.4, where="post")
    axes.set_xlabel("seconds")
    _whole_numbers(axes.yaxis)
    axes.set_ylabel("requests at once")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _png(figure)


def occupancy(picture: Picture) -> bytes:
    """How full held blocks are, over all steps: a share of blocks for each number of live tokens."""
    figure, axes = _figure(7.2, 2.8)
    width = 0.8 / len(picture.occupancy)
    for i, (arm, shares) in enumerate(picture.occupancy.items()):
        places = np.arange(len(shares)) - 0.4 + (i + 0.5) * width
        axes.bar(places, np.array(shares) * 100, width, color=COLOURS[arm], label=arm)
    _whole_numbers(axes.xaxis)
    axes.set_xlabel("live tokens in a held block")
    axes.set_ylabel("% of held blocks")
    axes.legend(frameon=False, ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _png(figure)


def slots(before: Sequence[str], after: Sequence[str]) -> bytes:
    """Every cell of the pool, block beside block, before and after a reclaim."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    images = [_tiles(cells) for cells in (before, after)]
    height = min(7.0, 1.1 + 7.2 * 2 * images[0].shape[0] / images[0].shape[1])
    figure, both = _figure(7.2, height, rows=2)
    colours = ListedColormap(["white", *(_CELL_COLOURS[cell] for cell in Cell)])
    for axes, image, title in zip(both, images, ("before", "after"), strict=True):
        axes.imshow(image, cmap=colours, vmin=-1, vmax=3, interpolation="nearest", aspect="auto")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
    patches = [Patch(facecolor=_CELL_COLOURS[cell], edgecolor="#bbbbbb", label=_CELL_NAMES[cell]) for cell in Cell]
    figure.legend(handles=patches, frameon=False, ncols=4, fontsize=8, loc="outside lower center")
    return _png(figure)


def throughput_against_latency(sweeps: Iterable[Sweep]) -> bytes:
    """One point a limit on the requests at once: more to the left is quicker, more above is more."""
    figure, axes = _figure(7.2, 3.4)
    limit = 0.0
    for sweep in sweeps:
        points = sorted(sweep.points, key=lambda point: point.limit)
        latency = [point.decode_p95 * 1e3 for point in points]
        axes.plot(
            latency,
            [point.throughput for point in points],
            color=COLOURS[sweep.arm],
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            label=sweep.arm,
        )
        for point, at in zip(points, latency, strict=True):
            axes.annotate(
                str(point.limit), (at, point.throughput), fontsize=6, xytext=(3, 3), textcoords="offset points"
            )
        limit = max(limit, sweep.p95_limit)
    if limit:
        axes.axvline(limit * 1e3, color="black", linestyle=":", linewidth=1, label="SLA")
    axes.set_xlabel("decode p95, ms")
    axes.set_ylabel("answer tokens a second")
    axes.legend(frameon=False, ncols=5, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _png(figure)


def _tiles(blocks: Sequence[str]) -> Any:
    """[lines * (block_size + 1) - 1, blocks a line]: blocks as columns, in lines of `_BLOCKS_A_LINE`, -1 between."""
    cells = np.array([[int(digit) for digit in block] for block in blocks], np.int8)
    num_blocks, size = cells.shape
    num_lines = -(-num_blocks // _BLOCKS_A_LINE)
    padded = np.full((num_lines * _BLOCKS_A_LINE, size + 1), -1, np.int8)
    padded[:num_blocks, :size] = cells
    lines = padded.reshape(num_lines, _BLOCKS_A_LINE, size + 1).transpose(0, 2, 1)
    return lines.reshape(num_lines * (size + 1), _BLOCKS_A_LINE)[: num_lines * (size + 1) - 1]


def _figure(width: float, height: float, rows: int = 1) -> tuple[Figure, Any]:
    # Never pyplot: it keeps every figure, and may look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1)
    for one in np.atleast_1d(axes):
        _plain(one)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


def _whole_numbers(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=17, integer=True))


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
