"""`StepPlan`s by hand, for tests of everything below the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.copy import Copy
from vtoken.policies.statistics import Statistic
from vtoken.schedule.plan import SamplingBatch, StatisticOrder, StepPlan


@dataclass
class Lane:
    """A sequence's KV as a test lays it out: row `r` lies in block `block_table[r // block_size]`."""

    block_size: int
    block_table: list[int]
    past: dict[int, int] = field(default_factory=dict)  # live row -> position

    def slots(self, rows: Sequence[int]) -> NDArray[np.int64]:
        table = np.asarray(self.block_table, dtype=np.int64)
        rows_ = np.asarray(rows, dtype=np.int64)
        return table[rows_ // self.block_size] * self.block_size + rows_ % self.block_size

    @property
    def next_position(self) -> int:
        return max(self.past.values(), default=-1) + 1


@dataclass
class Slice:
    """Tokens to compute for a lane. Rows default to the positions, as in a sequence that never lost a token."""

    lane: Lane
    token_ids: Sequence[int]
    first_position: int | None = None  # None: the one after the last live past token
    rows: Sequence[int] | None = None

    @property
    def positions(self) -> list[int]:
        first = self.lane.next_position if self.first_position is None else self.first_position
        return list(range(first, first + len(self.token_ids)))

    @property
    def write_rows(self) -> list[int]:
        return self.positions if self.rows is None else list(self.rows)

    def commit(self) -> None:
        """What the books do when the step is done: the new tokens join the past."""
        self.lane.past.update(zip(self.write_rows, self.positions, strict=True))


def greedy(slices: Sequence[int]) -> SamplingBatch:
    return draws(slices)


def draws(
    slices: Sequence[int],
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seeds: int | Sequence[int] = 0,
    choices: int | Sequence[int] = 0,
    indices: int | Sequence[int] = 0,
) -> SamplingBatch:
    """A batch in which a scalar holds for every draw."""

    def column(values: object, dtype: type) -> NDArray[np.generic]:
        return np.broadcast_to(np.asarray(values, dtype=dtype), (len(slices),)).copy()

    return SamplingBatch(
        slices=column(slices, np.int32),
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seeds=column(seeds, np.uint64),
        choices=column(choices, np.int32),
        indices=column(indices, np.int32),
    )


def order(
    statistic: Statistic,
    slices: Sequence[int],
    first: int | Sequence[int] = 0,
    owners: Sequence[int] | None = None,
    due: Sequence[bool] | None = None,
) -> StatisticOrder:
    """An order in which a scalar holds for every slice. Owners are the slices themselves unless told otherwise."""
    return StatisticOrder(
        statistic,
        np.asarray(slices, np.int32),
        np.broadcast_to(np.asarray(first, np.int64), (len(slices),)).copy(),
        np.asarray(slices if owners is None else owners, np.int64),
        None if due is None else np.asarray(due, np.bool_),
    )


def make_plan(
    slices: Sequence[Slice],
    *,
    block_size: int | None = None,
    sampling: SamplingBatch | None = None,
    copies: Sequence[Copy] = (),
    statistics: Sequence[Statistic | StatisticOrder] = (),
    step: int = 0,
) -> StepPlan:
    """A plan for these slices, drawing greedily after each of them unless told otherwise. A statistic without an order
    is wanted of all slices, over all queries or tokens."""
    size = slices[0].lane.block_size if block_size is None else block_size
    num_entries = max((len(s.lane.block_table) for s in slices), default=0)
    words = -(-size // 32)
    tables = np.full((len(slices), num_entries), -1, dtype=np.int32)
    masks = np.zeros((len(slices), num_entries, words), dtype=np.uint32)
    row_positions = np.full((len(slices), num_entries * size), -1, dtype=np.int32)
    for i, s in enumerate(slices):
        tables[i, : len(s.lane.block_table)] = s.lane.block_table
        for row, position in s.lane.past.items():
            masks[i, row // size, row % size // 32] |= np.uint32(1 << (row % size % 32))
            row_positions[i, row] = position
    is_moved = any(row != position for s in slices for row, position in s.lane.past.items())
    flat = lambda parts, dtype: np.concatenate([np.zeros(0, dtype), *(np.asarray(p, dtype) for p in parts)])  # noqa: E731
    return StepPlan(
        step=step,
        block_size=size,
        copies=tuple(copies),
        lanes=np.arange(len(slices), dtype=np.int32),
        starts=np.cumsum([0, *(len(s.token_ids) for s in slices)]).astype(np.int32),
        token_ids=flat([s.token_ids for s in slices], np.int32),
        positions=flat([s.positions for s in slices], np.int32),
        write_slots=flat([s.lane.slots(s.write_rows) for s in slices], np.int64),
        write_rows=flat([s.write_rows for s in slices], np.int32),
        block_tables=tables,
        masks=masks,
        past_live=np.array([len(s.lane.past) for s in slices], dtype=np.int32),
        sampling=greedy(range(len(slices))) if sampling is None else sampling,
        row_positions=row_positions if is_moved else None,
        statistics=tuple(
            each if isinstance(each, StatisticOrder) else order(each, range(len(slices))) for each in statistics
        ),
    )
