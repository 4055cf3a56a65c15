"""Planted bugs: each one is a slip that somebody could make in `memory/`, put in by monkeypatching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from vtoken.memory.beside import BesideMoves
from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import BlockTable
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.prefix_cache import PrefixCache
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


def wrap(patch: pytest.MonkeyPatch, owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, self, *args)`."""
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
        self._free_lanes += lanes

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
