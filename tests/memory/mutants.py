"""Planted bugs: each one is a slip that somebody could make in `memory/`, put in by monkeypatching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from vtoken.memory import reclaim, reclaimer
from vtoken.memory.beside import BesideMoves
from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import BlockTable
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.prefix_cache import PrefixCache
from vtoken.memory.reclaimer import Reclaimer
from vtoken.memory.slot_allocator import SlotAllocator
from vtoken.memory.token_table import TokenTable

MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def mutant(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    MUTANTS[plant.__name__] = plant
    return plant


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run with a bug; with None, without."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MUTANTS[name](patch)
        yield


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, self, *args)`, or a function of a module by `wrapper(original, *args)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **kwargs: wrapper(original, self, *args, **kwargs))


@mutant
def map_switched_before_the_copy_ended(patch: pytest.MonkeyPatch) -> None:
    def begin(original, self, lane, source_rows, target_rows, sources, targets):
        copy = original(self, lane, source_rows, target_rows, sources, targets)
        self._tokens.move(lane, source_rows, target_rows)
        return copy

    wrap(patch, BesideMoves, "begin", begin)


@mutant
def block_handed_out_while_pinned(patch: pytest.MonkeyPatch) -> None:
    def drop_refs(original, self, blocks):
        pins, self.pins = self.pins, np.zeros_like(self.pins)
        cached = original(self, blocks)
        self.pins = pins
        return cached

    def take(original, self, count):
        blocks = original(self, count)
        self.closed[blocks] = 0
        return blocks

    wrap(patch, BlockPool, "drop_refs", drop_refs)
    wrap(patch, BlockPool, "take", take)


@mutant
def source_freed_before_the_copy_ended(patch: pytest.MonkeyPatch) -> None:
    def begin(original, self, lane, source_rows, target_rows, sources, targets):
        copy = original(self, lane, source_rows, target_rows, sources, targets)
        blocks = np.unique(sources // self._pool.block_size).astype(np.int32)
        self._pool.pins[blocks] -= 1
        self._pool.drop_refs(blocks)
        return copy

    wrap(patch, BesideMoves, "begin", begin)


@mutant
def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    def copy_on_write(original, self, copied, fresh):
        self._drop(fresh)
        return ()

    wrap(patch, KVCacheManager, "_copy_on_write", copy_on_write)


@mutant
def copy_on_write_orders_no_copy(patch: pytest.MonkeyPatch) -> None:
    def copy_on_write(original, self, copied, fresh):
        original(self, copied, fresh)
        return ()

    wrap(patch, KVCacheManager, "_copy_on_write", copy_on_write)


@mutant
def columns_left_behind(patch: pytest.MonkeyPatch) -> None:
    def move(original, self, lane, source_rows, target_rows):
        columns, self.columns = self.columns, {}
        original(self, lane, source_rows, target_rows)
        self.columns = columns

    wrap(patch, TokenTable, "move", move)


@mutant
def published_block_written(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, PrefixCache, "forget_block", lambda original, self, block: None)


@mutant
def double_release(patch: pytest.MonkeyPatch) -> None:
    def release(original, self, lanes):
        for lane in lanes:
            if not self.on_host[lane]:
                held = self.blocks.held(lane)
                self._drop(held[self.pool.refs[held] > 1])  # one reference too many
        original(self, lanes)

    wrap(patch, KVCacheManager, "release", release)


@mutant
def lane_released_twice(patch: pytest.MonkeyPatch) -> None:
    def release(original, self, lanes):
        original(self, lanes)
        self.lanes.free.extend(lanes)

    wrap(patch, KVCacheManager, "release", release)


@mutant
def pending_entry_left_after_a_failed_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "withdraw_pending", PrefixCache.commit_pending)


@mutant
def publish_after_eviction(patch: pytest.MonkeyPatch) -> None:
    def publish(original, self, lane, hashes):
        evicted, self.tokens.evicted = self.tokens.evicted, np.zeros_like(self.tokens.evicted)
        original(self, lane, hashes)
        self.tokens.evicted = evicted

    wrap(patch, KVCacheManager, "publish", publish)


@mutant
def dead_tokens_moved_too(patch: pytest.MonkeyPatch) -> None:
    def finish(original, self, ticket, **kwargs):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockTable, "is_live", lambda self, lanes, rows: np.ones(len(rows), np.bool_))
            return original(self, ticket, **kwargs)

    wrap(patch, BesideMoves, "finish", finish)


@mutant
def claimed_cells_left_open(patch: pytest.MonkeyPatch) -> None:
    def begin(original, self, lane, source_rows, target_rows, sources, targets):
        copy = original(self, lane, source_rows, target_rows, sources, targets)
        self._pool.closed[:] = 0
        return copy

    wrap(patch, BesideMoves, "begin", begin)


@mutant
def moves_survive_a_fork(patch: pytest.MonkeyPatch) -> None:
    def fork(original, self, lane):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BesideMoves, "drop", lambda self, lane: None)
            return original(self, lane)

    wrap(patch, KVCacheManager, "fork", fork)


@mutant
def children_stay_when_a_block_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forget(original, self, entry):
        entry.children.clear()
        original(self, entry)

    wrap(patch, PrefixCache, "forget", forget)


@mutant
def twin_starts_with_empty_statistics(patch: pytest.MonkeyPatch) -> None:
    def copy_lane(original, self, source, target):
        columns, self.columns = self.columns, {}
        original(self, source, target)
        self.columns = columns

    wrap(patch, TokenTable, "copy_lane", copy_lane)


@mutant
def whole_prompt_matched(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, KVCacheManager, "match", lambda original, self, hashes, max_tokens: original(self, hashes, 2**30))


# --- reclaim across the pool, and the arms ---------------------------------------------------------------------------


@mutant
def survivor_left_in_a_returned_block(patch: pytest.MonkeyPatch) -> None:
    def rows_to_move(original, *args, **kwargs):
        sources, targets = original(*args, **kwargs)
        return sources[:-1], targets[:-1]

    wrap(patch, reclaimer, "rows_to_move", rows_to_move)


@mutant
def spare_cells_ignored(patch: pytest.MonkeyPatch) -> None:
    def plan_reclaim(original, live, block_size, **kwargs):
        return original(live, block_size, **{**kwargs, "spare_cells": 0})

    wrap(patch, reclaimer, "plan_reclaim", plan_reclaim)


@mutant
def more_blocks_packed_than_wanted(patch: pytest.MonkeyPatch) -> None:
    def plan_reclaim(original, live, block_size, **kwargs):
        return original(live, block_size, **{**kwargs, "wanted": None})

    wrap(patch, reclaimer, "plan_reclaim", plan_reclaim)


@mutant
def first_sequences_instead_of_cheapest_blocks(patch: pytest.MonkeyPatch) -> None:
    def num_taken(original, costs, allowed, limit):
        offered = allowed.sum(axis=1)
        return np.clip(limit - (np.cumsum(offered) - offered), 0, offered)

    wrap(patch, reclaim, "_num_taken", num_taken)


@mutant
def shared_blocks_packed(patch: pytest.MonkeyPatch) -> None:
    def own_blocks(original, pool, *args):
        refs, pool.refs = pool.refs, np.minimum(pool.refs, 1)
        found = original(pool, *args)
        pool.refs = refs
        return found

    wrap(patch, reclaimer, "own_blocks", own_blocks)


@mutant
def blocks_packed_while_a_copy_touches_them(patch: pytest.MonkeyPatch) -> None:
    def own_blocks(original, pool, *args):
        pins, pool.pins = pool.pins, np.zeros_like(pool.pins)
        found = original(pool, *args)
        pool.pins = pins
        return found

    wrap(patch, reclaimer, "own_blocks", own_blocks)


@mutant
def sequence_packed_while_it_moves(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, BesideMoves, "is_pending", lambda original, self, lane: False)


@mutant
def dead_blocks_of_the_first_sequence_alone(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Reclaimer, "_return_dead", lambda original, self, lanes: original(self, lanes[:1]))


@mutant
def blocks_for_tokens_to_come_taken_for_dead(patch: pytest.MonkeyPatch) -> None:
    def return_dead(original, self, lanes):
        num_rows, self._tokens.num_rows = self._tokens.num_rows, np.full_like(self._tokens.num_rows, 2**20)
        num_returned = original(self, lanes)
        self._tokens.num_rows = num_rows
        return num_returned

    wrap(patch, Reclaimer, "_return_dead", return_dead)


@mutant
def blocks_counted_that_others_still_hold(patch: pytest.MonkeyPatch) -> None:
    def give_back(original, self, lanes, which):
        original(self, lanes, which)
        return int(which.sum())

    wrap(patch, Reclaimer, "_give_back", give_back)


@mutant
def holes_filled_in_the_naive_arm(patch: pytest.MonkeyPatch) -> None:
    def place(original, self, lanes, counts):
        reuses, self.reuse_cells = self.reuse_cells, True
        placement = original(self, lanes, counts)
        self.reuse_cells = reuses
        return placement

    wrap(patch, SlotAllocator, "place", place)


@mutant
def cells_behind_the_last_token_lost_after_repacking(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Reclaimer, "_end_behind_last", lambda original, self, lane: None)
