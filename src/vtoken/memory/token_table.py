"""`TokenTable`: where each token of a text lies, whether it still lives, and what was measured about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vtoken.memory import bits
from vtoken.memory.bits import Ints
from vtoken.memory.block_table import BlockTable, grown

_NEVER = -1  # in place of a position


class TokenTable:
    """Engine-wide: per lane and row the token's position and the statistics columns; per position its death.

    Three spaces, two maps: `position -> row` is kept here, `row -> slot` is arithmetic on the `BlockTable`, whose masks
    also say which rows live. What stands in a dead row means nothing.

    `columns` names the statistics and their dtype, for instance `{"attention": np.float32}`; `add_column` makes more.
    """

    def __init__(self, blocks: BlockTable, columns: Mapping[str, DTypeLike] | None = None) -> None:
        self.blocks = blocks
        num_lanes, num_entries = blocks.ids.shape
        num_rows = num_entries * blocks.block_size
        self.positions: NDArray[np.int32] = np.zeros((num_lanes, num_rows), np.int32)
        self.columns: dict[str, NDArray[Any]] = {
            name: np.zeros((num_lanes, num_rows), dtype) for name, dtype in (columns or {}).items()
        }
        self._starts_as: dict[str, float] = {}  # what a new token has in a column, where that is not 0
        self.lengths: NDArray[np.int32] = np.zeros(num_lanes, np.int32)  # positions that have got a row so far
        self.num_rows: NDArray[np.int32] = np.zeros(num_lanes, np.int32)  # rows [0, num_rows) have been used
        self.num_live: NDArray[np.int32] = np.zeros(num_lanes, np.int32)
        self.evicted: NDArray[np.bool_] = np.zeros(num_lanes, np.bool_)  # has lost a token
        self.in_order: NDArray[np.bool_] = np.ones(num_lanes, np.bool_)  # row = position in every live row
        # [lane, position] the length at which the token died, 0 = alive. Made at the first eviction of all.
        self._died_at: NDArray[np.int32] = np.zeros((num_lanes, 0), np.int32)

    def add_column(self, name: str, starts_as: float = 0.0) -> None:
        """Keep one more statistic, float64, `starts_as` for the tokens that are there and for new ones. A name that is
        known already is no error."""
        if name not in self.columns:
            self.columns[name] = np.full(self.positions.shape, starts_as)
            self._starts_as[name] = starts_as

    def drop_columns(self, names: Iterable[str]) -> None:
        """Keep these statistics no longer."""
        for name in names:
            del self.columns[name]
            self._starts_as.pop(name, None)

    def grow(self, num_lanes: int) -> None:
        """Follow the block table, which has grown, to `num_lanes` lanes."""
        num_rows = self.blocks.ids.shape[1] * self.blocks.block_size
        self.positions = grown(self.positions, (num_lanes, num_rows), 0)
        self.columns = {name: grown(column, (num_lanes, num_rows), 0) for name, column in self.columns.items()}
        self.lengths = grown(self.lengths, (num_lanes,), 0)
        self.num_rows = grown(self.num_rows, (num_lanes,), 0)
        self.num_live = grown(self.num_live, (num_lanes,), 0)
        self.evicted = grown(self.evicted, (num_lanes,), False)
        self.in_order = grown(self.in_order, (num_lanes,), True)
        self._died_at = grown(self._died_at, (num_lanes, self._died_at.shape[1]), 0)

    def clear(self, lane: int) -> None:
        self._died_at[lane, : self.lengths[lane]] = 0
        self.lengths[lane] = self.num_rows[lane] = self.num_live[lane] = 0
        self.evicted[lane], self.in_order[lane] = False, True

    def copy_lane(self, source: int, target: int) -> None:
        """Make `target` (clear) the same as `source`, columns included."""
        rows, length = self.num_rows[source], self.lengths[source]
        for array in (self.positions, *self.columns.values()):
            array[target, :rows] = array[source, :rows]
        for array in (self.lengths, self.num_rows, self.num_live, self.evicted, self.in_order):
            array[target] = array[source]
        self._died_at[target, :length] = self._died_at[source, :length]

    def forget(self, lanes: Ints, entries: Ints) -> None:
        """These (lane, entry) pairs have got a new block: nothing has lain in its cells."""
        size = self.blocks.block_size
        is_gap = entries * size < self.num_rows[lanes]  # behind the last row used nobody looks
        if is_gap.any():
            rows = entries[is_gap, None] * size + np.arange(size)
            self.positions[lanes[is_gap, None], rows] = _NEVER

    def num_used(self, lanes: Ints, rows: Ints) -> int:
        """In how many of these free (lane, row) pairs a token has lain before."""
        is_hole = rows < self.num_rows[lanes]
        return int(np.count_nonzero(self.positions[lanes[is_hole], rows[is_hole]] != _NEVER)) if is_hole.any() else 0

    def append(self, lanes: Ints, rows: Ints, positions: Ints) -> None:
        """Enter new tokens: distinct (lane, row) pairs and the position of each. Their statistics start anew."""
        self.positions[lanes, rows] = positions
        for name, column in self.columns.items():
            column[lanes, rows] = self._starts_as.get(name, 0)
        self.blocks.set_live(lanes, rows)
        np.maximum.at(self.num_rows, lanes, rows + 1)
        np.add.at(self.lengths, lanes, 1)
        np.add.at(self.num_live, lanes, 1)
        self.in_order[lanes[rows != positions]] = False

    def add_statistics(self, name: str, lanes: Ints, values: NDArray[np.floating[Any]]) -> None:
        """Add `values` [n, rows] to a column of the distinct `lanes` [n], run by run of neighbouring lanes: adding in
        place moves half the bytes that a gather and a scatter would."""
        if not len(lanes):
            return
        column = self.columns[name][:, : values.shape[1]]
        ends = np.append(np.flatnonzero(np.diff(lanes) != 1) + 1, len(lanes))
        start = 0
        for end in ends.tolist():
            column[lanes[start] : lanes[start] + end - start] += values[start:end]
            start = end

    def replace_statistics(self, name: str, lanes: Ints, values: NDArray[np.floating[Any]]) -> None:
        """Put `values` [n, rows] into a column of the distinct `lanes` [n], except where they are NaN."""
        rows = values.shape[1]
        self.columns[name][lanes, :rows] = np.where(np.isnan(values), self.columns[name][lanes, :rows], values)

    def fade_statistics(self, name: str, lanes: Ints, factors: NDArray[np.float64]) -> None:
        """Multiply a column of the distinct `lanes` [n] by `factors` [n]; 0 starts it anew."""
        self.columns[name][lanes] *= factors[:, None]

    def kill(self, lanes: Ints, rows: Ints) -> None:
        """Mark distinct live (lane, row) pairs dead and record at which length they died."""
        positions = self.positions[lanes, rows]
        if len(positions) and int(positions.max()) >= self._died_at.shape[1]:
            capacity = max(int(positions.max()) + 1, 2 * self._died_at.shape[1], self.positions.shape[1])
            self._died_at = grown(self._died_at, (len(self.lengths), capacity), 0)
        self._died_at[lanes, positions] = self.lengths[lanes]
        self.blocks.set_dead(lanes, rows)
        np.subtract.at(self.num_live, lanes, 1)
        self.evicted[lanes] = True

    def move(self, lane: int, source_rows: Ints, target_rows: Ints) -> None:
        """Everything known about the live `source_rows` goes to the free `target_rows`."""
        lanes = np.full(len(source_rows), lane)
        for array in (self.positions, *self.columns.values()):
            array[lane, target_rows] = array[lane, source_rows]
        self.blocks.set_dead(lanes, source_rows)
        self.blocks.set_live(lanes, target_rows)
        if len(target_rows):
            self.num_rows[lane] = max(self.num_rows[lane], int(target_rows.max()) + 1)
            self.in_order[lane] = False

    def cut(self, lane: int) -> None:
        """Follow the block table, which has dropped trailing entries."""
        self.num_rows[lane] = min(self.num_rows[lane], self.blocks.num_entries[lane] * self.blocks.block_size)

    def died_at(self, lane: int) -> dict[int, int]:
        """Position -> the length of the text at which the token died."""
        if not self.evicted[lane]:
            return {}
        deaths = self._died_at[lane, : self.lengths[lane]]
        positions = np.flatnonzero(deaths)
        return dict(zip(positions.tolist(), deaths[positions].tolist(), strict=True))

    def live_by_position(self, lanes: Ints) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]]:
        """(rows, positions, whether there is a token), each [n, T]: the live tokens of the distinct `lanes` [n] in
        order of position, padded behind to the most that one of them has."""
        num_entries = int(self.blocks.num_entries[lanes].max(initial=0))
        live = bits.unpack(self.blocks.masks[lanes, :num_entries], self.blocks.block_size)
        positions = np.where(live, self.positions[lanes, : live.shape[1]], np.iinfo(np.int32).max)
        most = int(self.num_live[lanes].max(initial=0))
        rows = np.argsort(positions, axis=1, kind="stable")[:, :most]
        positions = np.take_along_axis(positions, rows, axis=1)
        return rows, positions, np.arange(most) < self.num_live[lanes][:, None]

    def rows_of(self, lane: int, positions: Sequence[int] | Ints) -> NDArray[np.int64]:
        """The rows of live tokens. Raises KeyError for a dead or unknown position."""
        rows, live = self.live(lane)
        asked = np.asarray(positions, np.int64)
        found = np.searchsorted(live, asked)
        known = np.append(live, -1)[found] == asked
        if not known.all():
            raise KeyError(f"lane {lane} holds no live token of position {asked[~known][0]}")
        return rows[found]

    def row_of(self, lane: int, position: int) -> int:
        """The row of a live token. Raises KeyError for a dead or unknown position."""
        return int(self.rows_of(lane, [position])[0])

    def slot_of(self, lane: int, position: int) -> int:
        """The slot in which a live token lies. Raises KeyError for a dead or unknown position."""
        row = self.row_of(lane, position)
        return int(self.blocks.slots(np.array([lane]), np.array([row]))[0])

    def live(self, lane: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(rows, positions) of the live tokens, in the order of their positions."""
        rows = self.blocks.live_rows(lane)
        positions = self.positions[lane, rows]
        order = np.argsort(positions, kind="stable")
        return rows[order], positions[order]
