"""Lanes, rows and positions: how the tables grow, and what they say about a token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.memory.driver import BooksDriver
from tests.memory.model import COLUMN
from vtoken.memory.block_table import BlockTable
from vtoken.memory.kv_cache_manager import KVCacheManager


def text(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


@pytest.mark.parametrize("size", [4, 33])
def test_tables_grow_with_the_lanes_and_keep_what_is_in_them(size: int) -> None:
    books = BooksDriver(size, num_blocks=80)
    lanes = [books.compute(text(size + i, first=100 * i)) for i in range(5)]
    for lane in lanes:
        books.measure(lane, lane)
        books.evict({lane: [1]})
    lanes += [books.compute(text(size + i, first=100 * i)) for i in range(5, 20)]  # the driver verifies every lane
    assert lanes == list(range(20))
    assert len(books.manager.blocks.ids) >= 20
    books.finish_all()


@pytest.mark.parametrize("grows_in", ["admit", "extend"])
def test_tables_grow_with_the_length_and_keep_what_is_in_them(grows_in: str) -> None:
    books = BooksDriver(num_blocks=64)
    short = books.compute(text(7))
    books.measure(short, 3)
    books.evict({short: [2]})
    capacity = books.manager.blocks.ids.shape[1]
    num_tokens = 4 * capacity + 1
    if grows_in == "admit":
        books.compute(text(num_tokens))
    else:
        lane = books.admit(text(num_tokens), num_tokens=4)
        books.grow({lane: num_tokens})
    assert books.manager.blocks.ids.shape[1] > capacity
    assert books.manager.tokens.positions.shape == (8, books.manager.blocks.ids.shape[1] * 4)
    books.evict({short: [5]})  # deaths beyond what was recorded so far
    assert books.manager.tokens.died_at(short) == {2: 7, 5: 7}


def test_a_lane_starts_clean_whatever_was_in_it() -> None:
    books = BooksDriver()
    lane = books.compute(text(12))
    books.measure(lane, 9)
    books.evict({lane: [3, 11]})
    books.reclaim(lane)
    books.release([lane])
    assert books.compute(text(5, first=50)) == lane
    assert books.manager.tokens.died_at(lane) == {}
    assert not books.manager.tokens.evicted[lane]
    assert books.manager.tokens.in_order[lane]
    assert not books.manager.tokens.columns[COLUMN][lane, :5].any()
    books.grow({lane: 3}, publish=True)
    assert len(books.manager.match(books.hashes(text(5, first=50)), 5)) == 1


def test_a_released_lane_is_used_again_before_new_ones() -> None:
    books = BooksDriver()
    lanes = [books.compute(text(3)) for _ in range(3)]
    books.release([lanes[1]])
    assert books.compute(text(3)) == lanes[1]
    assert books.manager.used_lanes == lanes


def test_where_a_token_lies_and_when_it_died() -> None:
    books = BooksDriver(free_order=[5, 2, *(b for b in range(16) if b not in (5, 2))])
    lane = books.compute(text(7), publish=False)
    tokens = books.manager.tokens
    assert [tokens.slot_of(lane, p) for p in range(7)] == [20, 21, 22, 23, 8, 9, 10]
    books.evict({lane: [1]})
    books.grow({lane: 2})
    assert tokens.row_of(lane, 7) == 1
    assert tokens.slot_of(lane, 7) == 21
    books.evict({lane: [7]})
    assert tokens.died_at(lane) == {1: 7, 7: 9}
    for dead_or_unknown in (1, 7, 9):
        with pytest.raises(KeyError, match=f"no live token of position {dead_or_unknown}"):
            tokens.row_of(lane, dead_or_unknown)


def test_live_tokens_are_listed_in_the_order_of_the_text() -> None:
    books = BooksDriver()
    lane = books.compute(text(6), publish=False)
    books.evict({lane: [0, 4]})
    books.grow({lane: 2})
    rows, positions = books.manager.tokens.live(lane)
    assert positions.tolist() == [1, 2, 3, 5, 6, 7]
    assert rows.tolist() == [1, 2, 3, 5, 0, 4]


def test_rows_stay_in_order_until_one_does_not() -> None:
    books = BooksDriver()
    lane = books.compute(text(8), publish=False)
    books.evict({lane: [2]})
    assert books.manager.tokens.in_order[lane], "a hole alone leaves row = position"
    twin = books.fork(lane)
    books.grow({lane: 1})
    assert books.manager.tokens.in_order[lane], "the block with the hole is shared, so it took a new one"
    books.release([twin])
    books.grow({lane: 4})
    assert not books.manager.tokens.in_order[lane], "its own holes it fills"


def test_trailing_entries_are_cut_and_others_stay_as_gaps() -> None:
    books = BooksDriver()
    lane = books.compute(text(16), publish=False)
    books.evict({lane: [4, 5, 6, 7]})
    books.reclaim(lane, compact=False)
    assert books.manager.blocks.num_entries[lane] == 4
    books.evict({lane: list(range(8, 16))})
    books.reclaim(lane, compact=False)
    assert books.manager.blocks.num_entries[lane] == 1
    assert books.manager.tokens.num_rows[lane] == 4
    assert books.manager.tokens.lengths[lane] == 16


def test_many_lanes_change_in_one_call() -> None:
    table = BlockTable(33, num_lanes=3, num_entries=2)
    table.ids[:] = np.arange(6).reshape(3, 2)
    table.num_entries[:] = 2
    lanes, rows = np.array([0, 2, 2, 0]), np.array([0, 31, 32, 65])
    table.set_live(lanes, rows)
    assert table.is_live(lanes, rows).all()
    assert [table.live_rows(lane).tolist() for lane in range(3)] == [[0, 65], [], [31, 32]]
    assert table.slots(lanes, rows).tolist() == [0, 4 * 33 + 31, 4 * 33 + 32, 1 * 33 + 32]
    table.set_dead(lanes[1:], rows[1:])
    assert [table.live_rows(lane).tolist() for lane in range(3)] == [[0], [], []]


def test_every_kind_of_column_travels() -> None:
    manager = KVCacheManager(4, 4, columns={"mass": np.float32, "hits": np.int64, "flag": np.bool_})
    lane = manager.admit(8)
    assert lane is not None
    manager.extend(manager.plan_extend(np.array([lane]), np.array([8])))
    for name, column in manager.tokens.columns.items():
        column[lane, 4:6] = 1
        assert column.dtype == {"mass": np.float32, "hits": np.int64, "flag": np.bool_}[name]
    manager.evict(np.full(3, lane), np.array([1, 2, 3]))
    manager.relocate(lane, np.array([4, 5]), np.array([1, 2]))
    for column in manager.tokens.columns.values():
        assert column[lane, [0, 1, 2]].tolist() == [0, 1, 1]
