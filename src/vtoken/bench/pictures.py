"""From recordings to what the plots are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vtoken.bench.arms import Run
from vtoken.bench.report import Cell, Line, Picture

MOST_POINTS: Final = 400  # of a line
MOST_BLOCKS: Final = 512  # of a map


def picture(cell: Cell, runs: Mapping[str, Run]) -> Picture:
    """What happened in one cell, arm beside arm, and the pool before and after vtoken's largest reclaim."""
    occupancy = {arm: run.recording.occupancy / max(1, int(run.recording.occupancy.sum())) for arm, run in runs.items()}
    slot_map = next((runs[arm].recording.slot_map for arm in ("vtoken", "repack") if arm in runs), None)
    return Picture(
        cell=cell,
        lines=[_line(arm, run) for arm, run in runs.items()],
        occupancy={arm: [round(float(share), 6) for share in shares] for arm, shares in occupancy.items()},
        slots_before=None if slot_map is None else _digits(slot_map.before),
        slots_after=None if slot_map is None else _digits(slot_map.after),
        blocks_returned=0 if slot_map is None else slot_map.blocks_returned,
    )


def _line(arm: str, run: Run) -> Line:
    steps = run.recording.steps
    kept = np.unique(np.linspace(0, max(0, len(steps) - 1), min(MOST_POINTS, len(steps))).astype(np.int64))
    some = steps[kept]
    return Line(
        arm=arm,
        seconds=[round(float(second), 6) for second in some["time"]],
        held=[int(n) for n in some["held"]],
        floor=[int(n) for n in some["floor"]],
        running=[int(n) for n in some["running"]],
    )


def _digits(cells: NDArray[np.uint8]) -> list[str]:
    return ["".join(map(str, block)) for block in cells[:MOST_BLOCKS].tolist()]
