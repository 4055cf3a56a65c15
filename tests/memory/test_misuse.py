"""What the books refuse, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.memory.driver import BooksDriver
from tests.memory.model import array, fingerprint
from vtoken.base.errors import InvariantError
from vtoken.memory.kv_cache_manager import KVCacheManager


def text(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


@pytest.mark.parametrize("size", [-1, 0, 3, 257])
def test_block_sizes_out_of_range(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size must be 4 to 256, got {size}"):
        KVCacheManager(8, size)


def test_a_pool_has_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        KVCacheManager(0, 16)


def test_a_price_is_no_less_than_nothing() -> None:
    with pytest.raises(ValueError, match="max_cost_per_block must be None or at least 0 tokens, got -1"):
        KVCacheManager(8, 16, max_cost_per_block=-1)


def crowd() -> BooksDriver:
    """Lane 0: three blocks, published, its first shared with lane 1; lane 2 on the host; lane 3 not in use."""
    books = BooksDriver()
    assert [books.compute(text(11)), books.compute(text(5)), books.compute(text(6, first=50))] == [0, 1, 2]
    books.swap_out([2])
    books.evict({0: [9]})
    return books


CASES: dict[str, tuple[Callable[[KVCacheManager], object], str]] = {
    "evict a dead token": (lambda m: m.evict(array(0), array(9)), "only live tokens can be evicted"),
    "evict a row never used": (lambda m: m.evict(array(0), array(11)), "only live tokens can be evicted"),
    "evict a token twice": (lambda m: m.evict(array(0, 0), array(4, 4)), "each only once"),
    "evict from a lane not in use": (lambda m: m.evict(array(3), array(0)), "only live tokens can be evicted"),
    "release a lane not in use": (lambda m: m.release([3]), "a lane is released once"),
    "release a lane twice": (lambda m: m.release([0, 0]), "a lane is released once"),
    "fork on the host": (lambda m: m.fork(2), "in use and on the device"),
    "fork a lane not in use": (lambda m: m.fork(3), "in use and on the device"),
    "extend on the host": (lambda m: m.plan_extend(array(0, 2), array(1, 1)), "in use and on the device"),
    "extend a lane not in use": (lambda m: m.plan_extend(array(3), array(1)), "in use and on the device"),
    "relocate on the host": (lambda m: m.relocate(2, array(4), array(6)), "in use and on the device"),
    "relocate a dead token": (lambda m: m.relocate(0, array(9), array(11)), "only live tokens can be relocated"),
    "relocate to a live one": (lambda m: m.relocate(0, array(4), array(8)), "targets must be free cells"),
    "relocate into a shared block": (lambda m: m.relocate(0, array(4), array(0)), "targets must be free cells"),
    "relocate out of all blocks": (lambda m: m.relocate(0, array(4), array(99)), "targets must be free cells"),
    "relocate from a shared block": (lambda m: m.relocate(0, array(1), array(11)), "no source of a relocation"),
    "relocate one token twice": (lambda m: m.relocate(0, array(4, 4), array(9, 11)), "each target once"),
    "relocate two to one cell": (lambda m: m.relocate(0, array(4, 5), array(9, 9)), "each target once"),
    "relocate with a target short": (lambda m: m.relocate(0, array(4, 5), array(9)), "each target once"),
    "reclaim on the host": (lambda m: m.reclaim([0, 2]), "in use and on the device"),
    "reclaim from a lane not in use": (lambda m: m.reclaim([3]), "in use and on the device"),
    "reclaim from a lane twice": (lambda m: m.reclaim([0, 1, 0]), "names each lane once"),
    "reclaim fewer than no blocks": (lambda m: m.reclaim([0], wanted=-1), "must not be negative"),
    "leave fewer than no cells": (lambda m: m.reclaim([0, 1], spare_cells=array(1, -1)), "must not be negative"),
    "fragmentation on the host": (lambda m: m.fragmentation([2]), "in use and on the device"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_and_nothing_changed(name: str) -> None:
    call, message = CASES[name]
    books = crowd()
    before = fingerprint(books.manager)
    with pytest.raises(ValueError, match=message):
        call(books.manager)
    assert fingerprint(books.manager) == before
    books.finish_all()


def test_a_source_of_one_copy_is_no_source_of_another() -> None:
    books = crowd()
    books.relocate(0, [4], [9], beside=True)
    with pytest.raises(ValueError, match="another copy reads"):
        books.manager.relocate(0, array(5), array(11))


def test_publishing_from_the_host_is_refused() -> None:
    books = crowd()
    with pytest.raises(ValueError, match="in use and on the device"):
        books.manager.publish(2, books.hashes(text(6, first=50)))


def test_a_match_that_was_forgotten_meanwhile_admits_nobody() -> None:
    books = BooksDriver()
    books.release([books.compute(text(9))])
    matched = books.manager.match(books.hashes(text(9)), 8)
    books.forget_oldest()
    before = fingerprint(books.manager)
    with pytest.raises(ValueError, match="match again right before admit"):
        books.manager.admit(9, matched)
    assert fingerprint(books.manager) == before


def test_more_blocks_than_there_are_is_a_bug_of_the_caller() -> None:
    books = BooksDriver(num_blocks=4)
    lane = books.compute(text(9))
    books.release([books.compute(text(4, first=50))])
    placement = books.manager.plan_extend(array(lane), array(9))
    assert placement.num_blocks > books.manager.num_available
    with pytest.raises(InvariantError, match="2 blocks asked for, 1 are available"):
        books.manager.extend(placement)
    books.manager.check()
    assert books.manager.prefix.num_cached == 1, "nothing was forgotten in vain"


SPOILERS: dict[str, Callable[[KVCacheManager], object]] = {
    "references but": lambda m: m.pool.refs.__setitem__(m.blocks.ids[0, 0], 3),
    "holds a block twice": lambda m: m.blocks.ids.__setitem__((0, 1), m.blocks.ids[0, 0]),
    "entries in use": lambda m: m.blocks.num_entries.__setitem__(0, 4),
    "live rows, counted": lambda m: m.tokens.num_live.__setitem__(0, 2),
    "do not make up": lambda m: m.tokens.positions.__setitem__((0, 8), 1),
    "a live row beyond": lambda m: m.tokens.num_rows.__setitem__(0, 1),
    "rows used beyond": lambda m: m.tokens.num_rows.__setitem__(0, 99),
    "evicted flag": lambda m: m.tokens.evicted.__setitem__(1, True),
    "said to be in order": lambda m: m.tokens.positions.__setitem__((1, slice(0, 2)), [1, 0]),
    "no slot": lambda m: m.blocks.masks.__setitem__((0, 0, 0), 0x1F),
    "published blocks and prefix entries": lambda m: m.pool.published.__setitem__(m.blocks.ids[0, 2], True),
    "cached blocks and the list": lambda m: m.prefix.use(m.prefix.cached_blocks),
    "pinned by no move": lambda m: m.pool.pins.__setitem__(m.blocks.ids[0, 0], 1),
    "closed in a block": lambda m: m.pool.closed.__setitem__(m.blocks.ids[0, 0], 1),
    "a host block is published": lambda m: m.host_pool.pins.__setitem__(m.blocks.ids[2, 0], 1),
    "listed as free": lambda m: m.lanes.free.append(0),
    "still holds something": lambda m: m.tokens.lengths.__setitem__(3, 1),
}


@pytest.mark.parametrize("message", SPOILERS)
def test_check_sees_a_table_that_is_wrong_by_one(message: str) -> None:
    """`check()` is the watchman of all other tests."""
    books = crowd()
    books.release([books.compute(text(5, first=90))])
    books.manager.check()
    SPOILERS[message](books.manager)
    with pytest.raises(InvariantError, match=message):
        books.manager.check()


def test_check_sees_one_cell_read_as_two_positions() -> None:
    books = BooksDriver()
    lane = books.compute(text(6))
    twin = books.fork(lane)
    manager = books.manager
    manager.tokens.positions[twin, :2] = [1, 0]
    manager.tokens.in_order[twin] = False
    with pytest.raises(InvariantError, match="as another position than another lane"):
        manager.check()


def test_check_sees_a_claimed_cell_in_use() -> None:
    books = BooksDriver()
    lane = books.compute(text(6), publish=False)
    books.relocate(lane, [0], [7], beside=True)
    books.fork(lane)  # drops the move: its cell stays claimed
    books.manager.blocks.set_live(np.array([lane]), np.array([7]))
    with pytest.raises(InvariantError, match="a copy beside the steps may still write"):
        books.manager.check()
