"""The invariants of the books, runnable. Slow and plain: tests call it after every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtoken.base.errors import InvariantError
from vtoken.memory import bits
from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import EMPTY

if TYPE_CHECKING:
    from vtoken.memory.kv_cache_manager import KVCacheManager


def check(manager: KVCacheManager) -> None:
    """Raise InvariantError at the first contradiction."""
    manager.pool.check()
    manager.host_pool.check()
    manager.prefix.check()
    lanes = manager.used_lanes
    _check_references(manager.pool, [manager.blocks.held(lane) for lane in lanes if not manager.on_host[lane]])
    _check_references(manager.host_pool, [manager.blocks.held(lane) for lane in lanes if manager.on_host[lane]])
    manager.moves.check()
    # Keys and values on the host are only stored: nothing there is matched, and no copy runs beside the steps.
    if manager.host_pool.published.any() or manager.host_pool.pins.any():
        raise InvariantError("a host block is published or pinned")
    claimed = manager.moves.claimed()
    for lane in lanes:
        _check_lane(manager, lane, claimed)
    _check_shared_cells(manager, [lane for lane in lanes if not manager.on_host[lane]], manager.pool)
    _check_shared_cells(manager, [lane for lane in lanes if manager.on_host[lane]], manager.host_pool)
    _check_idle_lanes(manager)


def _check_idle_lanes(manager: KVCacheManager) -> None:
    # Invariant: a lane is in use or listed as free, once.
    idle = np.flatnonzero(~manager.is_open)
    if sorted(manager.lanes.free) != idle.tolist():
        raise InvariantError("the lanes listed as free are not those that no sequence uses")
    blocks, tokens = manager.blocks, manager.tokens
    counts = (blocks.num_entries, tokens.lengths, tokens.num_rows, tokens.num_live, tokens.evicted, manager.on_host)
    if (blocks.ids[idle] != EMPTY).any() or blocks.masks[idle].any() or any(count[idle].any() for count in counts):
        raise InvariantError("a lane that no sequence uses still holds something")


def _check_references(pool: BlockPool, held: list[np.ndarray]) -> None:
    # Invariant: a block has as many references as lanes hold it, so one with a single reference has a single reader.
    counted = np.zeros(pool.num_blocks, np.int64)
    for blocks in held:
        if len(np.unique(blocks)) != len(blocks):
            raise InvariantError(f"a lane holds a block twice: {blocks}")
        counted[blocks] += 1
    if (counted != pool.refs).any():
        block = int(np.flatnonzero(counted != pool.refs)[0])
        raise InvariantError(f"block {block} has {pool.refs[block]} references but {counted[block]} holders")


def _check_shared_cells(manager: KVCacheManager, lanes: list[int], pool: BlockPool) -> None:
    # Invariant: a cell holds one token, so all lanes that read it read it as the same position.
    position_of = np.full(pool.num_blocks * manager.block_size, -1)
    for lane in lanes:
        rows = manager.blocks.live_rows(lane)
        slots, positions = manager.blocks.slots(np.full(len(rows), lane), rows), manager.tokens.positions[lane, rows]
        if ((position_of[slots] != -1) & (position_of[slots] != positions)).any():
            raise InvariantError(f"lane {lane} reads a cell as another position than another lane does")
        position_of[slots] = positions


def _check_lane(manager: KVCacheManager, lane: int, claimed: NDArray[np.uint32]) -> None:
    blocks, tokens, size = manager.blocks, manager.tokens, manager.block_size
    num_entries = int(blocks.num_entries[lane])
    ids, masks = blocks.ids[lane], blocks.masks[lane]
    if (ids[num_entries:] != EMPTY).any() or (num_entries and ids[num_entries - 1] == EMPTY):
        raise InvariantError(f"lane {lane}: entries in use and their count differ")
    if masks[ids == EMPTY].any() or (masks & ~blocks.full).any():
        raise InvariantError(f"lane {lane}: a mask bit is set where there is no slot")
    if not manager.on_host[lane] and (masks & claimed[ids])[ids != EMPTY].any():
        raise InvariantError(f"lane {lane} reads a cell that a copy beside the steps may still write")
    live = blocks.live_rows(lane)
    positions = tokens.positions[lane, live]
    if len(live) != tokens.num_live[lane] or len(live) != bits.count(masks).sum():
        raise InvariantError(f"lane {lane}: {len(live)} live rows, counted {tokens.num_live[lane]}")
    if len(live) and (live[-1] >= tokens.num_rows[lane] or positions.min() < 0):
        raise InvariantError(f"lane {lane}: a live row beyond those used, or without a position")
    if tokens.num_rows[lane] > num_entries * size:
        raise InvariantError(f"lane {lane}: rows used beyond its entries")
    deaths = tokens.died_at(lane)
    # Invariant: every position that got a row is live in exactly one row or has died at a known length.
    known = np.sort(np.concatenate((positions, np.fromiter(deaths, np.int64, len(deaths)))))
    if not np.array_equal(known, np.arange(tokens.lengths[lane])):
        raise InvariantError(f"lane {lane}: live positions and deaths do not make up its {tokens.lengths[lane]} tokens")
    if tokens.in_order[lane] and (positions != live).any():
        raise InvariantError(f"lane {lane}: rows are said to be in order and are not")
    if bool(deaths) != bool(tokens.evicted[lane]):
        raise InvariantError(f"lane {lane}: evicted flag and recorded deaths differ")
