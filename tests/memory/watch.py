"""The watchmen of `BooksDriver`: the books against the shadow store and the model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.memory.model import COLUMN, ModelLane, expect
from tests.memory.shadow import ShadowStore
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.prefix_cache import PrefixEntry


def verify_lane(manager: KVCacheManager, store: ShadowStore, lane: int, model: ModelLane) -> None:
    """Each live token of a sequence reads its own value and has its own statistics."""
    tokens = manager.tokens
    rows, positions = tokens.live(lane)
    expect(positions.tolist() == sorted(model.live), f"lane {lane}: the live positions are not those of the model")
    expect(tokens.lengths[lane] == len(model.values), f"lane {lane}: its length is wrong")
    expect(tokens.died_at(lane) == model.deaths, f"lane {lane}: its deaths are wrong")
    slots = manager.blocks.slots(np.full(len(rows), lane), rows)
    read = (store.host if manager.on_host[lane] else store.device)[slots]
    is_wrong = read != np.array(model.values, np.int64)[positions]
    if model.unwritten:
        is_wrong[np.isin(positions, list(model.unwritten))] = False
    expect(not is_wrong.any(), f"lane {lane}: positions {positions[is_wrong]} read another's values")
    mass = [model.mass[position] for position in positions.tolist()]
    expect(tokens.columns[COLUMN][lane, rows].tolist() == mass, f"lane {lane}: a token has another's statistics")


def verify_index(manager: KVCacheManager, store: ShadowStore, published: Mapping[PrefixEntry, list[int]]) -> None:
    """Each published block holds the text it stands for; what is pending may still be unwritten."""
    prefix, size = manager.prefix, manager.block_size
    pending = {id(entry) for entry in prefix._pending}
    for block, entry in prefix._of_block.items():
        if id(entry) not in pending:
            read = store.device[block * size : (block + 1) * size].tolist()
            expect(read == published.get(entry), f"published block {block} does not hold its text")


def verify_usage(manager: KVCacheManager) -> None:
    """`usage()` against a count of cells, lane by lane."""
    usage, size = manager.usage(), manager.block_size
    lanes = [lane for lane in manager.used_lanes if not manager.on_host[lane]]
    is_live = np.zeros(manager.pool.num_blocks * size, np.bool_)
    for lane in lanes:
        rows = manager.blocks.live_rows(lane)
        is_live[manager.blocks.slots(np.full(len(rows), lane), rows)] = True
    expect(usage.live_tokens == is_live.sum(), "usage counts other live tokens than there are")
    held = {block for lane in lanes for block in manager.blocks.held(lane).tolist()}
    expect(usage.held_blocks == len(held), "usage counts other held blocks than there are")
    parts = (usage.free_blocks, usage.held_blocks, usage.cached_blocks, usage.pinned_blocks)
    expect(min(parts) >= 0 and sum(parts) == usage.num_blocks, "the parts do not make up the pool")
    cells = usage.live_tokens + usage.holes + usage.tail_slack
    expect(cells == usage.held_blocks * size, "live tokens, holes and slack do not fill the held blocks")
    num_used = usage.live_tokens + usage.holes
    share = usage.holes / num_used if num_used else 0.0
    expect(abs(manager.fragmentation(lanes) - share) < 1e-12, "fragmentation is not the share of holes")
    alone = {lane: [state for state in manager.table(lane) if state.refs == 1] for lane in lanes}
    expect(usage.retained_blocks == sum(map(len, alone.values())), "usage counts other retained blocks than there are")
    unused = sum(s.entry * size >= manager.tokens.num_rows[lane] for lane in lanes for s in alone[lane])
    expect(usage.reserved_blocks == unused, "usage counts other blocks for tokens to come than there are")
    floor = sum(-(-sum(s.filled for s in states) // size) for states in alone.values())
    expect(usage.floor_blocks == floor, "usage has another floor than the live tokens make it")
