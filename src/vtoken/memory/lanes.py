"""`Lanes`: which lanes of the engine-wide tables a sequence has, on which side its blocks are, and room for more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.block_table import BlockTable
from vtoken.memory.token_table import TokenTable


class Lanes:
    """A lane is in use or listed as free, once. The tables grow by doubling, so nothing is reserved for sequences or
    lengths that never come."""

    def __init__(self, blocks: BlockTable, tokens: TokenTable) -> None:
        self._blocks = blocks
        self._tokens = tokens
        num_lanes = len(blocks.num_entries)
        self.free = list(range(num_lanes))[::-1]  # the next one out last
        self.is_open: NDArray[np.bool_] = np.zeros(num_lanes, np.bool_)  # a sequence has the lane
        self.on_host: NDArray[np.bool_] = np.zeros(num_lanes, np.bool_)  # the lane's ids are of the host pool

    def open(self, num_entries: int) -> int:
        """A lane for a new sequence, with room for `num_entries` entries."""
        self.ensure(num_entries)
        lane = self.free.pop()
        self.is_open[lane] = True
        return lane

    def ensure(self, num_entries: int) -> None:
        """Grow the tables until there is a free lane and room for `num_entries` entries a lane."""
        num_lanes, capacity = self._blocks.ids.shape
        wanted = num_lanes if self.free else 2 * num_lanes
        if wanted == num_lanes and num_entries <= capacity:
            return
        self._blocks.grow(wanted, max(num_entries, 2 * capacity) if num_entries > capacity else capacity)
        self._tokens.grow(wanted)
        extra = wanted - num_lanes
        self.is_open = np.append(self.is_open, np.zeros(extra, np.bool_))
        self.on_host = np.append(self.on_host, np.zeros(extra, np.bool_))
        self.free += range(wanted - 1, num_lanes - 1, -1)

    def close(self, lane: int) -> None:
        """The sequence has left and holds no block any more."""
        self._tokens.clear(lane)
        self._blocks.clear(lane)
        self.is_open[lane] = self.on_host[lane] = False
        self.free.append(lane)

    @property
    def used(self) -> list[int]:
        lanes: list[int] = np.flatnonzero(self.is_open).tolist()
        return lanes

    def require_on_device(self, lanes: NDArray[np.int64] | list[int]) -> None:
        """Raise ValueError unless all `lanes` are in use and on the device."""
        if not self.is_open[lanes].all() or self.on_host[lanes].any():
            raise ValueError(f"not all lanes of {list(lanes)} are in use and on the device")
