"""Where a new token goes: the documented order, and the fast paths against the general one."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes
from vtoken.memory.block_table import EMPTY
from vtoken.memory.slot_allocator import UNPLACED


def rows_of_next(books: BooksDriver, lane: int, count: int) -> list[int]:
    return books.manager.plan_extend(np.array([lane]), np.array([count])).rows.tolist()


def text(num_tokens: int) -> list[int]:
    return [i % 3 for i in range(num_tokens)]


def test_a_sequence_that_lost_nothing_has_row_equal_to_position() -> None:
    books = BooksDriver()
    lane = books.admit(text(10))
    for count in (3, 1, 1, 5, 1, 7):
        extension = books.grow({lane: count})
        assert extension.rows.tolist() == extension.positions.tolist()
    assert books.manager.tokens.in_order[lane]


def test_holes_come_before_the_tail_and_the_lowest_first() -> None:
    books = BooksDriver()
    lane = books.compute(text(14), publish=False)
    books.evict({lane: [9, 2, 5]})
    assert rows_of_next(books, lane, 1) == [2]
    assert rows_of_next(books, lane, 6) == [2, 5, 9, 14, 15, 16]


def test_published_blocks_are_written_last_among_the_partly_used() -> None:
    books = BooksDriver()
    lane = books.compute(text(14))  # three published blocks, and two tokens in a fourth
    books.evict({lane: [1, 13]})
    assert rows_of_next(books, lane, 1) == [13]
    assert rows_of_next(books, lane, 5) == [13, 14, 15, 1, 16]
    books.grow({lane: 4})
    assert not books.manager.pool.published.any(), "what was published after a block that changed is out of reach"


def test_a_shared_tail_is_copied_and_its_holes_are_used_first() -> None:
    books = BooksDriver()
    lane = books.compute(text(6), publish=False)
    books.fork(lane)
    placement = books.manager.plan_extend(np.array([lane]), np.array([3]))
    assert placement.copied.tolist() == [[lane, 1]]
    assert placement.fresh.tolist() == [[lane, 2]]
    assert placement.rows.tolist() == [6, 7, 8]
    assert placement.num_blocks == 2


def test_of_those_who_share_a_tail_the_last_writes_in_place() -> None:
    books = BooksDriver()
    lane = books.compute(text(6), publish=False)
    twins = [books.fork(lane), books.fork(lane)]
    placement = books.manager.plan_extend(np.array([lane, *twins]), np.array([1, 1, 1]))
    assert placement.copied.tolist() == [[lane, 1], [twins[0], 1]]
    assert placement.num_blocks == 2


def test_a_shared_block_with_holes_is_left_alone_and_a_new_one_taken() -> None:
    books = BooksDriver()
    lane = books.compute(text(8), publish=False)
    books.fork(lane)
    books.evict({lane: [1, 6]})
    placement = books.manager.plan_extend(np.array([lane]), np.array([1]))
    assert placement.rows.tolist() == [8]
    assert not len(placement.copied)


def test_blocks_held_for_tokens_to_come_are_used_before_new_ones() -> None:
    books = BooksDriver()
    lane = books.admit(text(12))
    books.grow({lane: 3})
    assert books.manager.plan_extend(np.array([lane]), np.array([9])).num_blocks == 0
    assert books.manager.plan_extend(np.array([lane]), np.array([10])).fresh.tolist() == [[lane, 3]]


def test_a_new_block_goes_to_the_first_empty_entry() -> None:
    books = BooksDriver()
    lane = books.compute(text(16), publish=False)
    books.evict({lane: [*range(4), *range(8, 12)]})
    assert books.reclaim(lane, compact=False) == 2
    placement = books.manager.plan_extend(np.array([lane]), np.array([9]))
    assert placement.fresh.tolist() == [[lane, 0], [lane, 2], [lane, 4]]
    assert placement.rows.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16]


def test_cells_that_a_copy_beside_the_steps_needs_are_no_free_cells() -> None:
    books = BooksDriver()
    lane = books.compute(text(10), publish=False)
    books.evict({lane: [2]})
    copy = books.relocate(lane, [0, 1], [10, 11], beside=True)
    assert rows_of_next(books, lane, 1) == [12], "row 2 lies in the source block, rows 10 and 11 are targets"
    books.finish(copy.ticket)
    assert rows_of_next(books, lane, 4) == [0, 1, 2, 12], "the source block is open again, the targets are taken"


def test_planning_for_nobody_and_for_nothing() -> None:
    books = BooksDriver()
    lane = books.compute(text(5))
    empty = books.manager.plan_extend(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert empty.num_blocks == 0
    assert not len(empty.rows)
    nothing = books.manager.plan_extend(np.array([lane]), np.array([0]))
    assert nothing.num_blocks == 0
    assert nothing.starts.tolist() == [0, 0]


# --- without reuse of cells ------------------------------------------------------------------------------------------


def test_without_reuse_new_tokens_go_behind_the_last_row_used() -> None:
    books = BooksDriver(reuse_cells=False)
    lane = books.compute(text(10), publish=False)
    books.evict({lane: [2, 5, 8, 9]})
    assert rows_of_next(books, lane, 1) == [10], "also where the last ones used are dead"
    assert books.grow({lane: 5}).rows.tolist() == [10, 11, 12, 13, 14]
    assert len(books.blocks_of(lane)) == 4


def test_without_reuse_entries_are_only_appended() -> None:
    books = BooksDriver(reuse_cells=False)
    lane = books.compute(text(16), publish=False)
    books.evict({lane: list(range(4, 12))})
    assert books.reclaim(lane, compact=False) == 2
    placement = books.manager.plan_extend(np.array([lane]), np.array([5]))
    assert placement.fresh.tolist() == [[lane, 4], [lane, 5]]
    assert placement.rows.tolist() == [16, 17, 18, 19, 20]


def test_without_reuse_a_returned_tail_is_appended_anew() -> None:
    books = BooksDriver(reuse_cells=False)
    lane = books.compute(text(10), publish=False)
    books.evict({lane: [8, 9]})
    assert books.reclaim(lane, compact=False) == 1
    assert books.grow({lane: 2}).rows.tolist() == [8, 9]


def test_without_reuse_blocks_held_for_tokens_to_come_are_used_before_new_ones() -> None:
    books = BooksDriver(reuse_cells=False)
    lane = books.admit(text(16))
    books.grow({lane: 6})
    books.evict({lane: [0, 4, 5]})
    assert books.reclaim(lane, compact=False) == 1, "the second block is dead, the last two are not used yet"
    placement = books.manager.plan_extend(np.array([lane]), np.array([9]))
    assert placement.rows.tolist() == [8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert placement.fresh.tolist() == [[lane, 4]]


def test_without_reuse_a_shared_tail_is_copied_before_it_is_written() -> None:
    books = BooksDriver(reuse_cells=False)
    lane = books.compute(text(6), publish=False)
    twin = books.fork(lane)
    books.evict({lane: [1, 4]})
    placement = books.manager.plan_extend(np.array([lane, twin]), np.array([3, 1]))
    assert placement.copied.tolist() == [[lane, 1]]
    assert placement.rows.tolist() == [6, 7, 8, 6], "the last holder writes in place"
    books.grow({lane: 3, twin: 1})


def test_without_reuse_a_shared_tail_with_nothing_alive_in_it_is_left() -> None:
    books = BooksDriver(reuse_cells=False)
    lane = books.compute(text(6), publish=False)
    books.fork(lane)
    books.evict({lane: [4, 5]})
    placement = books.manager.plan_extend(np.array([lane]), np.array([1]))
    assert not len(placement.copied)
    assert placement.fresh.tolist() == [[lane, 2]]
    assert books.grow({lane: 1}).rows.tolist() == [8]


def test_what_reuse_saves_in_steady_decode() -> None:
    """At a fixed number of live tokens a sequence that reuses cells holds as many blocks for ever."""
    held = {}
    for reuses in (True, False):
        books = BooksDriver(num_blocks=20, reuse_cells=reuses)
        lane = books.compute(text(12), publish=False)
        draw = random.Random(1)
        for _ in range(40):
            books.evict({lane: [draw.choice(sorted(books.lanes[lane].live))]})
            books.reclaim(lane, compact=False)
            books.grow({lane: 1})
        held[reuses] = len(books.blocks_of(lane))
        assert books.manager.counters.tokens_relocated == 0
    assert held[True] == 3
    assert held[False] == 6


@settings(max_examples=80)
@given(size=block_sizes(), reuses=st.booleans(), data=st.data())
def test_fast_paths_agree_with_the_general_one(size: int, reuses: bool, data: st.DataObject) -> None:
    """Whatever the state, a lane placed by the fast path gets what the general one would give it."""
    books = BooksDriver(size, num_blocks=40, reuse_cells=reuses, check_books=False, check_shadow=False)
    number = st.integers(0, 2**16)
    for _ in range(data.draw(st.integers(1, 6), label="lanes")):
        lengths = [size * data.draw(st.integers(0, 2)) + data.draw(number) % size + 1 for _ in range(2)]
        lane = books.compute(text(lengths[0]), publish=data.draw(st.booleans()))
        if data.draw(st.booleans()):
            books.fork(lane)
        live = sorted(books.lanes[lane].live)
        books.evict({lane: live[data.draw(number) % len(live) :: data.draw(st.integers(1, 4))]})
        if data.draw(st.booleans()):
            books.reclaim(lane, compact=data.draw(st.booleans()), beside=data.draw(st.booleans()))
        rows, cells = books.movable(lane)
        count = min(len(rows), len(cells), data.draw(st.integers(0, 3)))
        if count and data.draw(st.booleans()):
            books.relocate(lane, rows[:count], cells[-count:], beside=True)

    slots, lanes = books.manager.slots, np.array(list(books.lanes))
    fast, is_fresh = slots._place_singles(lanes)
    general = [slots._place_one(int(lane), 1, {}) for lane in lanes]
    for lane, row, fresh, (rows, entries, copies) in zip(lanes.tolist(), fast, is_fresh, general, strict=True):
        if row != UNPLACED:
            assert rows.tolist() == [row], f"lane {lane}"
            assert entries.tolist() == ([row // size] if fresh else [])
            assert not copies

    # Together, and in any mix of counts: distinct cells of blocks that the lane may write.
    counts = np.array([data.draw(st.integers(0, 2 * size)) for _ in lanes])
    placement = books.manager.plan_extend(lanes, counts)
    pool, table = books.manager.pool, books.manager.blocks
    new = {tuple(pair) for pair in np.concatenate((placement.fresh, placement.copied)).tolist()}
    assert len(new) == placement.num_blocks
    copied = placement.copied.tolist()
    writers: dict[int, int] = {}
    for i, lane in enumerate(lanes.tolist()):
        rows = placement.rows[placement.starts[i] : placement.starts[i + 1]]
        assert len(np.unique(rows)) == len(rows) == counts[i]
        for row in rows.tolist():
            entry, offset = divmod(row, size)
            is_old = entry < table.num_entries[lane] and table.ids[lane, entry] != EMPTY
            assert is_old or (lane, entry) in new, "a token in a block that the lane neither has nor gets"
            assert reuses or row >= books.manager.tokens.num_rows[lane], "a cell that was used before"
            if is_old:
                assert not table.masks[lane, entry, offset // 32] >> (offset % 32) & 1, "a live token's cell"
            if is_old and (lane, entry) not in new:
                block = int(table.ids[lane, entry])
                assert not pool.closed[block, offset // 32] >> (offset % 32) & 1, "a cell that a copy needs"
                assert writers.setdefault(block, lane) == lane, "two lanes write one block"
                given_up = sum(table.ids[other, e] == block for other, e in copied)
                assert pool.refs[block] - given_up == 1, "a block that others still hold"
