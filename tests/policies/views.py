"""`TokenView`s made by hand: one `Lane` a sequence, padded with rubbish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vtoken.policies.base import TokenView
from vtoken.policies.statistics import Statistic

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Lane:
    """The live tokens of one sequence, in order of position."""

    positions: Sequence[int]
    statistics: Mapping[Statistic, ArrayLike] = field(default_factory=dict)
    length: int | None = None  # of the text; None: the newest token lives
    budget: int = 1
    blocks: Sequence[int] | None = None  # None: no token ever moved

    @property
    def text_length(self) -> int:
        return max(self.positions, default=-1) + 1 if self.length is None else self.length


def view_of(*lanes: Lane, padding: int = 0) -> TokenView:
    """A view of some lanes, `padding` tokens wider than the longest."""
    width = max((len(lane.positions) for lane in lanes), default=0) + padding
    needs = {need for lane in lanes for need in lane.statistics}

    def table(rows: Sequence[ArrayLike], rubbish: float, dtype: type) -> NDArray[np.generic]:
        filled = np.full((len(lanes), width), rubbish, dtype)
        for lane, row in zip(filled, rows, strict=True):
            values = np.asarray(row)
            lane[: len(values)] = values
        return filled

    counts = [len(lane.positions) for lane in lanes]
    blocks = [lane.blocks or [position // BLOCK_SIZE for position in lane.positions] for lane in lanes]
    return TokenView(
        positions=table([lane.positions for lane in lanes], -77, np.int32),
        is_live=table([np.ones(count, np.bool_) for count in counts], False, np.bool_),
        blocks=table(blocks, 10**9, np.int32),
        num_live=np.array(counts, np.int32),
        lengths=np.array([lane.text_length for lane in lanes], np.int32),
        budgets=np.array([lane.budget for lane in lanes], np.int32),
        statistics={need.name: table([lane.statistics[need] for lane in lanes], np.nan, np.float64) for need in needs},
    )
