"""`AttentionMetadata`: what attention has to know of a plan, built once and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.memory import bits
from vtoken.schedule.plan import StepPlan

ATTENTION = "attention"
"""Name of a statistic: the attention a row drew, its probabilities summed over queries, heads and layers."""


@dataclass(frozen=True, eq=False)
class Past:
    """The live past of one slice, in order of position."""

    rows: NDArray[np.int64]  # [P]
    slots: Tensor  # [P] int64
    positions: NDArray[np.int64]  # [P] ascending


@dataclass(eq=False)
class AttentionMetadata:
    """The plan's slices as attention sees them. `statistics` is where backends add up what was asked for."""

    block_size: int
    starts: list[int]  # [S + 1] slice s owns the flat tokens [starts[s], starts[s + 1])
    positions: NDArray[np.int64]  # [T]
    write_rows: NDArray[np.int32]  # [T]
    block_tables: NDArray[np.int32]  # [S, E], -1 = EMPTY
    masks: NDArray[np.uint32]  # [S, E, words]
    past_live: NDArray[np.int32]  # [S]
    row_positions: NDArray[np.int32] | None  # [S, E * block_size]; None: row = position
    # Name -> float64 [S, rows]. Exact sums of fixed-point numbers (see `ReferenceAttention`), so that neither the order
    # of layers nor the cut of chunks can change them.
    statistics: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @classmethod
    def from_plan(cls, plan: StepPlan) -> AttentionMetadata:
        num_rows = plan.block_tables.shape[1] * plan.block_size
        if plan.num_tokens:
            num_rows = max(num_rows, int(plan.write_rows.max()) + 1)
        return cls(
            block_size=plan.block_size,
            starts=plan.starts.tolist(),
            positions=plan.positions.astype(np.int64),
            write_rows=plan.write_rows,
            block_tables=plan.block_tables,
            masks=plan.masks,
            past_live=plan.past_live,
            row_positions=plan.row_positions,
            statistics={name: np.zeros((plan.num_slices, num_rows)) for name in plan.statistics},
        )

    @property
    def num_slices(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def pasts(self) -> list[Past]:
        """The live past of each slice."""
        live = bits.unpack(self.masks, self.block_size)  # [S, E * block_size]
        return [self._past(s, np.flatnonzero(live[s])) for s in range(self.num_slices)]

    def _past(self, s: int, rows: NDArray[np.int64]) -> Past:
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
