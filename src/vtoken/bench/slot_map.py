"""`SlotMap`: a picture of every cell of the pool, before and after a reclaim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from vtoken.memory import bits
from vtoken.memory.block_table import EMPTY
from vtoken.schedule.scheduler import Scheduler

Cells = NDArray[np.uint8]


class Cell(IntEnum):
    FREE = 0  # of a block that nobody holds
    TAIL = 1  # of a held block, behind its last used cell
    DEAD = 2  # of a held block, below its last used cell, and nothing lives there
    LIVE = 3


@dataclass(frozen=True)
class SlotMap:
    """`before` shows the places that the tokens alive afterwards had before: what died in between is dead in both.
    `after` shows nothing that was handed out once the blocks were back: new tokens, new requests, preemptions."""

    step: int
    blocks_returned: int  # held before, free after
    before: Cells  # [blocks, block_size] of `Cell`
    after: Cells


@dataclass(frozen=True)
class _Books:
    """The books of one moment, lane by lane, in copies."""

    requests: NDArray[np.int64]  # [lanes] number of the request, -1 = none
    ids: NDArray[np.int32]
    masks: NDArray[np.uint32]
    num_rows: NDArray[np.int32]
    lengths: NDArray[np.int32]
    positions: NDArray[np.int32]

    @classmethod
    def of(cls, scheduler: Scheduler) -> _Books:
        memory = scheduler.memory
        requests = np.full(len(memory.is_open), -1, np.int64)
        for request in scheduler.running:
            requests[request.lanes] = request.index
        num_entries = int(memory.blocks.num_entries.max())
        num_rows = num_entries * memory.block_size
        return cls(
            requests,
            memory.blocks.ids[:, :num_entries].copy(),
            memory.blocks.masks[:, :num_entries].copy(),
            memory.tokens.num_rows.copy(),
            memory.tokens.lengths.copy(),
            memory.tokens.positions[:, :num_rows].copy(),
        )

    def live(self, block_size: int) -> NDArray[np.bool_]:
        """[lanes, rows]"""
        return bits.unpack(self.masks, block_size)


class SlotWatch:
    """Keeps the map of the step whose packing returned most blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.best: SlotMap | None = None
        self._scheduler = scheduler
        self._before: _Books | None = None
        self._num_packed = 0
        self._most = 0  # blocks that packing returned in the step of `best`

    def before(self) -> None:
        """A step is about to be planned."""
        self._num_packed = self._scheduler.memory.counters.blocks_reclaimed_packed
        # Nothing moves before the first death.
        self._before = _Books.of(self._scheduler) if self._scheduler.memory.tokens.evicted.any() else None

    def after(self) -> None:
        """It was planned, and tokens were moved."""
        memory = self._scheduler.memory
        num_returned = memory.counters.blocks_reclaimed_packed - self._num_packed
        if self._before is None or (self.best is not None and num_returned <= self._most):
            return
        before, after = self._before, _Books.of(self._scheduler)
        size, num_blocks = memory.block_size, memory.pool.num_blocks
        was_live, is_live = before.live(size), after.live(size)
        is_held = after.ids != EMPTY
        num_rows = after.num_rows.copy()
        stayed = after.requests[: len(before.requests)]  # lanes may have been added since
        is_held[len(before.requests) :] = False
        for lane in range(len(before.requests)):
            if before.requests[lane] < 0 or before.requests[lane] != after.requests[lane]:
                is_held[lane] = False  # let in since; or preempted, and shown as it lay, below
                continue
            is_live[lane] &= after.positions[lane] < before.lengths[lane]
            was_live[lane] &= np.isin(before.positions[lane], after.positions[lane][is_live[lane]])
            num_rows[lane] = min(num_rows[lane], before.num_rows[lane])
            # A block without a token that was there before has been taken since, unless it was its lane's already.
            known = np.full(is_held.shape[1], EMPTY, before.ids.dtype)
            common = min(len(known), before.ids.shape[1])
            known[:common] = before.ids[lane, :common]
            is_held[lane] &= is_live[lane].reshape(-1, size).any(axis=1) | (known == after.ids[lane])
        cells = _cells(before, before.ids != EMPTY, was_live, before.num_rows, num_blocks, size)
        then = _cells(after, is_held, is_live, num_rows, num_blocks, size)
        for lane in np.flatnonzero((before.requests >= 0) & (before.requests != stayed)).tolist():
            blocks = before.ids[lane][before.ids[lane] != EMPTY]
            then[blocks] = cells[blocks]
        is_free = [(map_ == Cell.FREE).all(axis=1) for map_ in (cells, then)]
        num_back = int((is_free[1] & ~is_free[0]).sum())
        self.best, self._most = SlotMap(self._scheduler.counters.steps, num_back, cells, then), num_returned


def _cells(
    books: _Books,
    is_held: NDArray[np.bool_],  # [lanes, entries]
    live: NDArray[np.bool_],
    num_rows: NDArray[np.int32],
    num_blocks: int,
    block_size: int,
) -> Cells:
    cells = np.full((num_blocks, block_size), Cell.FREE, np.uint8)
    lanes, entries = np.nonzero(is_held & (books.requests >= 0)[:, None])
    rows = entries[:, None] * block_size + np.arange(block_size)
    is_used = rows < num_rows[lanes][:, None]
    states = np.where(live[lanes[:, None], rows], Cell.LIVE, np.where(is_used, Cell.DEAD, Cell.TAIL))
    cells[books.ids[lanes, entries]] = states
    return cells
