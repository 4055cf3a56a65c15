"""`SlotAllocator`: where a new token goes.

A free cell is a cell of a writable block of the sequence in which no live token lies, and that no copy beside the steps
has claimed: tail slack and the holes that evictions left are one thing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.memory import bits
from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import EMPTY, BlockTable
from vtoken.memory.token_table import TokenTable

UNPLACED = -1


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the next tokens of some lanes will go. Made without changing anything; valid until the books change.

    Lane `lanes[i]` gets the rows `rows[starts[i] : starts[i + 1]]`.
    """

    lanes: NDArray[np.int64]  # [n]
    starts: NDArray[np.int64]  # [n + 1]
    rows: NDArray[np.int64]  # [tokens]
    fresh: NDArray[np.int64]  # [m, 2] (lane, entry) that need a block
    copied: NDArray[np.int64]  # [k, 2] (lane, entry) whose shared block is copied before it is written

    @property
    def num_blocks(self) -> int:
        """Blocks it takes from the pool."""
        return len(self.fresh) + len(self.copied)


class SlotAllocator:
    """Chooses the cells of new tokens, in this order:

    1. free cells of partly used blocks: unpublished blocks first, then the lowest row;
    2. the block in which the text ends, if it is not full but others hold it too: it is copied first (copy on write);
    3. blocks that the sequence holds but does not use yet;
    4. new blocks, in the first EMPTY entries.

    A sequence that never lost a token therefore has row = position.

    With `reuse_cells=False` it does what engines do that only mark tokens dead: a new token goes behind the last row
    used, in the same order of kinds of blocks, and new blocks are appended; holes and EMPTY entries are left alone.
    """

    def __init__(self, pool: BlockPool, blocks: BlockTable, tokens: TokenTable, *, reuse_cells: bool = True) -> None:
        self.reuse_cells = reuse_cells
        self._pool = pool
        self._blocks = blocks
        self._tokens = tokens

    def place(self, lanes: NDArray[np.int64], counts: NDArray[np.int64]) -> Placement:
        """Cells for the next `counts[i]` tokens of `lanes[i]`; the lanes are distinct."""
        starts = np.concatenate(([0], np.cumsum(counts)))
        rows = np.full(int(starts[-1]), UNPLACED, np.int64)
        single = np.flatnonzero(counts == 1)
        rows[starts[single]], is_fresh = self._place_singles(lanes[single])
        fresh_lanes = lanes[single[is_fresh]]
        fresh = [np.stack((fresh_lanes, rows[starts[single[is_fresh]]] // self._blocks.block_size), axis=1)]
        copied = []
        # Holders that copy on write has taken from a block within this placement: the last of them writes in place.
        dropped: dict[int, int] = {}
        placed = np.append(rows, 0)[starts[:-1]] != UNPLACED  # a lane is placed as a whole: its first row tells
        for i in np.flatnonzero((counts > 0) & ~placed):
            lane = int(lanes[i])
            rows[starts[i] : starts[i + 1]], entries, copies = self._place_one(lane, int(counts[i]), dropped)
            fresh.append(np.stack((np.full_like(entries, lane), entries), axis=1))
            copied += [(lane, entry) for entry in copies]
        return Placement(lanes, starts, rows, np.concatenate(fresh), np.array(copied, np.int64).reshape(-1, 2))

    def free_cells(self, lane: int) -> NDArray[np.int64]:
        """The rows of a lane's free cells, ascending."""
        ids = self._blocks.ids[lane, : self._blocks.num_entries[lane]]
        writable = (ids != EMPTY) & (self._pool.refs[ids] == 1)
        return self._free_rows(lane, writable)

    def _free_rows(self, lane: int, writable: NDArray[np.bool_]) -> NDArray[np.int64]:
        entries = np.flatnonzero(writable)
        masks = self._blocks.masks[lane, entries] | self._pool.closed[self._blocks.ids[lane, entries]]
        dead = np.flatnonzero(~bits.unpack(masks, self._blocks.block_size))
        block, offset = np.divmod(dead, self._blocks.block_size)
        return entries[block] * self._blocks.block_size + offset

    def _place_singles(self, lanes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """One token a lane, many lanes at once: (row or UNPLACED, whether it needs a new block)."""
        if not self.reuse_cells:
            return self._next_at_end(lanes)
        is_fresh = np.zeros(len(lanes), np.bool_)
        rows = np.full(len(lanes), UNPLACED, np.int64)
        is_dense = self._tokens.num_live[lanes] == self._tokens.num_rows[lanes]
        dense, sparse = np.flatnonzero(is_dense), np.flatnonzero(~is_dense)
        rows[dense], is_fresh[dense] = self._next_at_end(lanes[dense])
        if len(sparse):
            rows[sparse] = self._next_hole(lanes[sparse])
        return rows, is_fresh

    def _next_at_end(self, lanes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """For lanes without holes, or whose holes are left alone: the row after the last one, unless it lies in a block
        that may not be written."""
        rows = self._tokens.num_rows[lanes].astype(np.int64)
        entries = rows // self._blocks.block_size
        is_fresh = entries >= self._blocks.num_entries[lanes]
        blocks = self._blocks.ids[lanes, np.minimum(entries, self._blocks.ids.shape[1] - 1)]
        pool = self._pool
        writable = (blocks != EMPTY) & (pool.refs[blocks] == 1) & ~pool.published[blocks] & (pool.pins[blocks] == 0)
        return np.where(is_fresh | writable, rows, UNPLACED), is_fresh

    def _next_hole(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """For lanes with holes: the lowest free cell of their partly used, unpublished blocks."""
        num_entries = int(self._blocks.num_entries[lanes].max())
        masks = self._blocks.masks[lanes, :num_entries]
        free, pool = ~masks & self._blocks.full, self._pool
        if pool.pins.any():
            free &= ~pool.closed[self._blocks.ids[lanes, :num_entries]]
        # Of the flat array: numpy's search in two dimensions takes ten times as long.
        picked, entries = np.divmod(np.flatnonzero(bits.occupied(free) & bits.occupied(masks)), num_entries)
        blocks = self._blocks.ids[lanes[picked], entries]
        writable = (pool.refs[blocks] == 1) & ~pool.published[blocks]
        picked, entries = picked[writable], entries[writable]
        first = np.flatnonzero(np.diff(picked, prepend=-1))  # they come lane by lane, lowest entry first
        picked, entries = picked[first], entries[first]
        words = free[picked, entries]
        word = np.argmax(words != 0, axis=1)
        offsets = word * bits.WORD + bits.lowest_bit(words[np.arange(len(words)), word])
        rows = np.full(len(lanes), UNPLACED, np.int64)
        rows[picked] = entries * self._blocks.block_size + offsets
        return rows

    def _place_one(
        self, lane: int, count: int, dropped: dict[int, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
        """The general case: (rows, entries that need a new block, entries to copy first)."""
        size, pool = self._blocks.block_size, self._pool
        num_entries = int(self._blocks.num_entries[lane])
        ids = self._blocks.ids[lane, :num_entries]
        live = self._blocks.live_counts(lane)
        refs = np.array([pool.refs[b] - dropped.get(b, 0) if b != EMPTY else 0 for b in ids.tolist()], np.int64)

        first = 0 if self.reuse_cells else int(self._tokens.num_rows[lane])
        cells = self._free_rows(lane, refs == 1)
        cells = cells[np.searchsorted(cells, first) :]
        unused, published = live[cells // size] == 0, pool.published[ids[cells // size]]
        partly = cells[~unused][np.argsort(published[~unused], kind="stable")]
        chosen, copies = [partly[:count]], []
        if len(partly) < count:
            last = int(np.flatnonzero(live)[-1]) if live.any() else EMPTY
            # A copy of a block that was full once and has holes now would give fewer cells than a new block, so that a
            # request could outgrow what was promised to it.
            is_tail = last == int(self._tokens.lengths[lane]) // size
            if is_tail and refs[last] > 1 and not pool.published[ids[last]]:
                tail = last * size + np.flatnonzero(~bits.unpack(self._blocks.masks[lane, [last]], size))
                tail = tail[np.searchsorted(tail, first) :]
                if len(tail):
                    copies.append(last)
                    dropped[int(ids[last])] = dropped.get(int(ids[last]), 0) + 1
                    chosen.append(tail)
            chosen.append(cells[unused][np.argsort(published[unused], kind="stable")])
        num_missing = max(0, count - sum(map(len, chosen)))
        gaps = np.flatnonzero(ids == EMPTY) if self.reuse_cells else np.zeros(0, np.int64)
        num_fresh = -(-num_missing // size)
        entries = np.concatenate((gaps, num_entries + np.arange(num_fresh)))[:num_fresh]
        chosen.append((entries[:, None] * size + np.arange(size)).reshape(-1))
        return np.concatenate(chosen)[:count], entries, copies
