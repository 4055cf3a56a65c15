"""`BlockTable`: the blocks of every sequence and which of their slots are live. This is what attention reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.memory import bits
from vtoken.memory.bits import Ints

EMPTY = -1


def grown(array: NDArray[Any], shape: tuple[int, ...], fill: int | float | bool) -> NDArray[Any]:
    """A copy of `array` enlarged to `shape`, new elements set to `fill`."""
    larger = np.full(shape, fill, array.dtype)
    larger[tuple(slice(0, n) for n in array.shape)] = array
    return larger


@dataclass(frozen=True)
class BlockState:
    """One held block of one sequence."""

    entry: int
    block: int
    filled: int  # live tokens of this sequence in it
    refs: int  # sequences that hold it, this one included


class BlockTable:
    """Engine-wide: lane `l`, entry `e` -> block `ids[l, e]` (or EMPTY) and its live mask `masks[l, e]`.

    Row `r` of a lane lies in slot `r % block_size` of block `ids[lane, r // block_size]`.
    """

    def __init__(self, block_size: int, num_lanes: int = 8, num_entries: int = 8) -> None:
        self.block_size = block_size
        self.full = bits.full_block(block_size)
        self.ids: NDArray[np.int32] = np.full((num_lanes, num_entries), EMPTY, np.int32)
        self.masks: NDArray[np.uint32] = np.zeros((num_lanes, num_entries, len(self.full)), np.uint32)
        self.num_entries: NDArray[np.int32] = np.zeros(num_lanes, np.int32)  # entries in use, EMPTY holes included

    def grow(self, num_lanes: int, num_entries: int) -> None:
        self.ids = grown(self.ids, (num_lanes, num_entries), EMPTY)
        self.masks = grown(self.masks, (num_lanes, num_entries, len(self.full)), 0)
        self.num_entries = grown(self.num_entries, (num_lanes,), 0)

    def clear(self, lane: int) -> None:
        used = self.num_entries[lane]
        self.ids[lane, :used] = EMPTY
        self.masks[lane, :used] = 0
        self.num_entries[lane] = 0

    def _bit_of(self, lanes: Ints, rows: Ints) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Flat index into the masks and the bit there, for each (lane, row)."""
        entries, offsets = np.divmod(rows.astype(np.int64), self.block_size)
        _, num_entries, words = self.masks.shape
        flat = (lanes.astype(np.int64) * num_entries + entries) * words + offsets // bits.WORD
        return flat, np.uint32(1) << (offsets % bits.WORD).astype(np.uint32)

    # Adding a clear bit sets it and subtracting a set bit clears it; unlike |= and &= these have a fast `at`.
    def set_live(self, lanes: Ints, rows: Ints) -> None:
        """Mark distinct dead (lane, row) pairs live."""
        flat, bit = self._bit_of(lanes, rows)
        np.add.at(self.masks.reshape(-1), flat, bit)

    def set_dead(self, lanes: Ints, rows: Ints) -> None:
        """Mark distinct live (lane, row) pairs dead."""
        flat, bit = self._bit_of(lanes, rows)
        np.subtract.at(self.masks.reshape(-1), flat, bit)

    def is_live(self, lanes: Ints, rows: Ints) -> NDArray[np.bool_]:
        flat, bit = self._bit_of(lanes, rows)
        live: NDArray[np.bool_] = (self.masks.reshape(-1)[flat] & bit) != 0
        return live

    def live_rows(self, lane: int) -> NDArray[np.int64]:
        """The live rows of a lane, ascending."""
        return np.flatnonzero(bits.unpack(self.masks[lane, : self.num_entries[lane]], self.block_size))

    def slots(self, lanes: Ints, rows: Ints) -> NDArray[np.int64]:
        """The slot in which each (lane, row) lies."""
        entries, offsets = np.divmod(rows.astype(np.int64), self.block_size)
        slots: NDArray[np.int64] = self.ids[lanes, entries].astype(np.int64) * self.block_size + offsets
        return slots

    def live_counts(self, lane: int) -> NDArray[np.int32]:
        """Live tokens in each entry of a lane."""
        return bits.count(self.masks[lane, : self.num_entries[lane]])

    def held(self, lane: int) -> NDArray[np.int32]:
        """The blocks of a lane in the order of its entries."""
        ids = self.ids[lane, : self.num_entries[lane]]
        held: NDArray[np.int32] = ids[ids != EMPTY]
        return held

    def cut(self, lane: int) -> None:
        """Drop trailing EMPTY entries."""
        used = np.flatnonzero(self.ids[lane, : self.num_entries[lane]] != EMPTY)
        self.num_entries[lane] = used[-1] + 1 if len(used) else 0
