"""What the books counted, and what every block is used for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
    reclaim_plans: int = 0  # how often somebody asked for blocks back
    blocks_reclaimed_dead: int = 0  # returned by running sequences after their last live token had died
    blocks_trimmed: int = 0  # returned by running sequences that had held them for tokens to come
    blocks_reclaimed_packed: int = 0  # returned after their live tokens had moved, in `finish` if beside the steps
    blocks_drained: int = 0  # of those: in `finish`
    tokens_relocated: int = 0
    tokens_evicted: int = 0
    cells_reused: int = 0  # tokens that were written where an evicted one had lain
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    prefix_query_tokens: int = 0  # tokens of admitted texts that could have been cached
    prefix_hit_tokens: int = 0  # tokens that were, and needed no computing
    forks: int = 0

    @property
    def blocks_reclaimed(self) -> int:
        """Blocks returned by running sequences after evictions."""
        return self.blocks_reclaimed_dead + self.blocks_reclaimed_packed

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
    retained_blocks: int  # held by one sequence alone
    reserved_blocks: int  # of those: with no used cell yet, held for tokens to come
    floor_blocks: int  # summed over sequences: ceil(live / block_size) of the tokens in blocks it holds alone

    @property
    def used_fraction(self) -> float:
        """Share of the pool that cannot be handed out now."""
        return (self.held_blocks + self.pinned_blocks) / self.num_blocks

    @classmethod
    def of(cls, manager: KVCacheManager) -> MemoryUsage:
        pool, blocks, size = manager.pool, manager.blocks, manager.block_size
        lanes = np.flatnonzero(manager.is_open & ~manager.on_host)
        used_cells, num_live = count_cells(manager, lanes)
        held = pool.refs > 0
        num_held = int(held.sum())
        ids = blocks.ids[lanes]
        alone = (ids != EMPTY) & (pool.refs[ids] == 1)
        live_alone = np.where(alone, bits.count(blocks.masks[lanes]), 0).sum(axis=1)
        is_used = np.arange(ids.shape[1]) * size < manager.tokens.num_rows[lanes][:, None]
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
            retained_blocks=int(alone.sum()),
            reserved_blocks=int((alone & ~is_used).sum()),
            floor_blocks=int((-(-live_alone // size)).sum()),
        )


def overlay(manager: KVCacheManager, lanes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Some lanes on the device laid over each other: ([num_blocks] cells up to the last used one, [num_blocks, words]
    a bit for each slot that one of the lanes reads)."""
    pool, blocks, size = manager.pool, manager.blocks, manager.block_size
    live = np.zeros((pool.num_blocks, len(blocks.full)), np.uint32)
    used_cells = np.zeros(pool.num_blocks, np.int64)
    ids = blocks.ids[lanes]
    index, entries = np.nonzero(ids != EMPTY)
    held = ids[index, entries]
    np.bitwise_or.at(live, held, blocks.masks[lanes[index], entries])
    np.maximum.at(used_cells, held, np.clip(manager.tokens.num_rows[lanes[index]] - entries * size, 0, size))
    return used_cells, live


def count_cells(manager: KVCacheManager, lanes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Of the blocks of some lanes on the device, [num_blocks]: (cells up to the last used one, cells that live).

    A cell lives if one of the lanes reads it.
    """
    used_cells, live = overlay(manager, lanes)
    return used_cells, bits.count(live)


def fragmentation(manager: KVCacheManager, lanes: NDArray[np.int64]) -> float:
    """Share of the used cells of the lanes' blocks in which nothing lives for any of them."""
    used_cells, num_live = count_cells(manager, lanes)
    num_used = int(used_cells.sum())
    return 1 - int(num_live.sum()) / num_used if num_used else 0.0
