"""`AttentionMetadata`: what attention has to know of a plan, built once and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.memory import bits
from vtoken.policies.statistics import AttentionStatistic, CountLow
from vtoken.schedule.plan import StatisticOrder, StepPlan

# Probabilities are summed as multiples of 2**-28. Below 2**25, which is 32,768 queries times 1,024 heads and layers all
# looking at one token, float64 sums of such numbers are exact, so their order cannot matter.
MASS_UNIT = 2.0**-28
NOBODY = np.iinfo(np.int64).max
"""`Tally.first` of a slice that wants nothing."""


@dataclass(frozen=True, eq=False)
class Tally:
    """What a backend adds up about rows while it attends: for each query, query head and layer

    - the probability of the row (attention mass), in exact units of `MASS_UNIT`; or
    - with `counts_low`, 1 where that is below `1 / t`, for a query that sees `t` tokens of which the row is one.

    Sums of such numbers are exact, so neither the order of layers nor the cut of chunks can change them.
    """

    counts_low: bool
    first: NDArray[np.int64]  # [S] queries at lower positions are not counted; NOBODY: the slice wants nothing
    values: NDArray[np.float64]  # [S, rows]

    def has_room(self, slices: NDArray[np.int32], counts_low: bool) -> bool:
        """Whether it is of this kind and nothing is added up for these slices yet."""
        return self.counts_low == counts_low and bool((self.first[slices] == NOBODY).all())


@dataclass(frozen=True, eq=False)
class Past:
    """The live past of one slice, in order of position."""

    rows: NDArray[np.int64]  # [P]
    slots: Tensor  # [P] int64
    positions: NDArray[np.int64]  # [P] ascending


@dataclass(eq=False)
class AttentionMetadata:
    """The plan's slices as attention sees them. `tallies` is where backends add up what was asked for."""

    block_size: int
    starts: list[int]  # [S + 1] slice s owns the flat tokens [starts[s], starts[s + 1])
    positions: NDArray[np.int64]  # [T]
    write_rows: NDArray[np.int32]  # [T]
    block_tables: NDArray[np.int32]  # [S, E], -1 = EMPTY
    masks: NDArray[np.uint32]  # [S, E, words]
    past_live: NDArray[np.int32]  # [S]
    row_positions: NDArray[np.int32] | None  # [S, E * block_size]; None: row = position
    tallies: list[Tally] = field(default_factory=list)
    _tally_of: dict[str, Tally] = field(default_factory=dict)  # by name of the statistic

    @classmethod
    def from_plan(cls, plan: StepPlan) -> AttentionMetadata:
        meta = cls(
            block_size=plan.block_size,
            starts=plan.starts.tolist(),
            positions=plan.positions.astype(np.int64),
            write_rows=plan.write_rows,
            block_tables=plan.block_tables,
            masks=plan.masks,
            past_live=plan.past_live,
            row_positions=plan.row_positions,
        )
        for order in plan.statistics:
            if isinstance(order.statistic, AttentionStatistic):
                meta.add(order)
        return meta

    def add(self, order: StatisticOrder) -> None:
        """Have an AttentionStatistic gathered: in the first tally that has room for it, or in one of its own. Two
        orders share a tally unless they want different things of the same slice."""
        counts_low = isinstance(order.statistic, CountLow)
        tally = next((tally for tally in self.tallies if tally.has_room(order.slices, counts_low)), None)
        if tally is None:
            first = np.full(self.num_slices, NOBODY, np.int64)
            tally = Tally(counts_low, first, np.zeros((self.num_slices, self.num_rows)))
            self.tallies.append(tally)
        tally.first[order.slices] = order.first
        self._tally_of[order.statistic.name] = tally

    def gathered(self, order: StatisticOrder) -> NDArray[np.float64]:
        """[n, rows] what was added up for an order so far."""
        values = self._tally_of[order.statistic.name].values
        return values if len(order) == self.num_slices else values[order.slices]

    @property
    def num_rows(self) -> int:
        """Columns of statistics: so many that every row of every slice has one."""
        num_rows = int(self.block_tables.shape[1]) * self.block_size
        return max(num_rows, int(self.write_rows.max(initial=-1)) + 1)

    @property
    def num_slices(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def pasts(self) -> list[Past]:
        """The live past of each slice."""
        return [self.past(s) for s in range(self.num_slices)]

    def past(self, s: int) -> Past:
        """The live past of slice `s`."""
        rows = np.flatnonzero(bits.unpack(self.masks[s : s + 1], self.block_size)[0])
        assert len(rows) == self.past_live[s], f"slice {s}: {len(rows)} live bits, past_live says {self.past_live[s]}"
        positions = rows
        if self.row_positions is not None:
            positions = self.row_positions[s, rows].astype(np.int64)
            order = np.argsort(positions)
            rows, positions = rows[order], positions[order]
        blocks = self.block_tables[s, rows // self.block_size].astype(np.int64)
        assert (blocks >= 0).all(), f"slice {s}: a live row lies in an EMPTY entry"
        slots = blocks * self.block_size + rows % self.block_size
        return Past(rows, torch.from_numpy(slots), positions)
