"""What the books counted, and what every block is used for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vtoken.memory import bits
from vtoken.memory.block_table import EMPTY

if TYPE_CHECKING:
    from vtoken.memory.kv_cache_manager import KVCacheManager


@dataclass
class MemoryCounters:
    """Totals since the start; they only grow."""

    blocks_taken: int = 0
    blocks_forgotten: int = 0  # cached blocks given up for new ones
    blocks_copied_on_write: int = 0
    tokens_copied_on_write: int = 0
    blocks_reclaimed: int = 0  # returned by running sequences after evictions
    tokens_relocated: int = 0
    tokens_evicted: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    prefix_query_tokens: int = 0  # tokens of admitted texts that could have been cached
    prefix_hit_tokens: int = 0  # tokens that were, and needed no computing
    forks: int = 0

    def copy(self) -> MemoryCounters:
        return replace(self)


@dataclass(frozen=True)
class MemoryUsage:
    """The device pool at one moment: `free + held + cached + pinned == num_blocks`."""

    num_blocks: int
    block_size: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    pinned_blocks: int
    shared_blocks: int  # held by more than one sequence
    partly_used_blocks: int
    live_tokens: int  # slots that at least one sequence reads; shared ones count once
    holes: int  # cells between the first and the last used one of a block in which nothing lives
    tail_slack: int  # cells after the last used one, for tokens to come

    @property
    def used_fraction(self) -> float:
        """Share of the pool that cannot be handed out now."""
        return (self.held_blocks + self.pinned_blocks) / self.num_blocks

    @classmethod
    def of(cls, manager: KVCacheManager) -> MemoryUsage:
        pool, size = manager.pool, manager.block_size
        live = np.zeros((pool.num_blocks, len(manager.blocks.full)), np.uint32)
        used_cells = np.zeros(pool.num_blocks, np.int64)
        lanes = [lane for lane in manager.used_lanes if not manager.on_host[lane]]
        ids = manager.blocks.ids[lanes]
        lane_index, entries = np.nonzero(ids != EMPTY)
        blocks = ids[lane_index, entries]
        np.bitwise_or.at(live, blocks, manager.blocks.masks[lanes][lane_index, entries])
        rows_in_block = manager.tokens.num_rows[lanes][lane_index] - entries * size
        np.maximum.at(used_cells, blocks, np.clip(rows_in_block, 0, size))
        held = pool.refs > 0
        num_held, num_live = int(held.sum()), bits.count(live)
        return cls(
            num_blocks=pool.num_blocks,
            block_size=size,
            free_blocks=pool.num_free,
            held_blocks=num_held,
            cached_blocks=manager.prefix.num_cached,
            pinned_blocks=pool.num_blocks - num_held - pool.num_free - manager.prefix.num_cached,
            shared_blocks=int((pool.refs > 1).sum()),
            partly_used_blocks=int((held & (num_live > 0) & (num_live < size)).sum()),
            live_tokens=int(num_live.sum()),
            holes=int((used_cells - num_live)[held].sum()),
            tail_slack=int((size - used_cells)[held].sum()),
        )
