"""`PlainBooks`: what a cache of blocks alone keeps of a decode step. The yardstick of the token-level books."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.kv_cache_manager import Extension, KVCacheManager
from vtoken.memory.slot_allocator import Placement

_NONE = np.empty((0, 2), np.int64)


class PlainBooks(KVCacheManager):
    """Token `p` of a text lies in cell `p % block_size` of block `p // block_size`: no masks, no rows, no columns.

    Vectorised like the books it is held against, and gives the same plans for sequences that share no block and lose no
    token, masks aside. Not for anything else: forks, prefix matches, evictions and swaps need what is left out.
    """

    def plan_extend(self, lanes: NDArray[np.int64], counts: NDArray[np.int64]) -> Placement:
        size = self.block_size
        starts = np.concatenate(([0], np.cumsum(counts)))
        computed = self.tokens.lengths[lanes].astype(np.int64)
        positions = np.repeat(computed - starts[:-1], counts) + np.arange(int(starts[-1]))
        held = self.blocks.num_entries[lanes].astype(np.int64)
        missing = np.maximum(-(-(computed + counts) // size) - held, 0)
        fresh = _NONE
        if missing.any():
            ends = np.cumsum(missing)
            entries = np.arange(int(ends[-1])) + np.repeat(held - (ends - missing), missing)
            fresh = np.stack((np.repeat(lanes, missing), entries), axis=1)
        return Placement(lanes, starts, positions, fresh, _NONE)

    def extend(self, placement: Placement) -> Extension:
        lanes, positions, blocks = placement.lanes, placement.rows, self.blocks
        counts = np.diff(placement.starts)
        if len(placement.fresh):
            self.lanes.ensure(int(placement.fresh[:, 1].max()) + 1)
            fresh_lanes, fresh_entries = placement.fresh.T
            blocks.ids[fresh_lanes, fresh_entries] = self._take(len(placement.fresh))
            np.maximum.at(blocks.num_entries, fresh_lanes, (fresh_entries + 1).astype(np.int32))
        entries, offsets = np.divmod(positions, self.block_size)
        written = blocks.ids[np.repeat(lanes, counts), entries]
        slots = written.astype(np.int64) * self.block_size + offsets
        num_entries = int(blocks.num_entries[lanes].max(initial=0))
        past = self.tokens.lengths[lanes]
        self.tokens.lengths[lanes] += counts.astype(np.int32)
        no_masks = np.zeros((len(lanes), num_entries, len(blocks.full)), np.uint32)  # attention is told to ignore them
        at = positions.astype(np.int32)
        return Extension(at, slots, at, blocks.ids[lanes, :num_entries], no_masks, past, ())
