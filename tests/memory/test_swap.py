"""Swap: blocks as they are, masks and columns with them, a group by distinct block."""

from __future__ import annotations

import numpy as np
import pytest

from tests.memory.driver import BooksDriver
from tests.memory.model import COLUMN
from vtoken.memory.copy import CopyKind


def text(num_tokens: int) -> list[int]:
    return [i % 3 for i in range(num_tokens)]


def test_a_group_is_swapped_by_distinct_block_and_its_sharing_comes_back() -> None:
    books = BooksDriver(num_blocks=12, num_host_blocks=8)
    lane = books.compute(text(10), publish=False)
    twins = [books.fork(lane), books.fork(lane)]
    group = [lane, *twins]
    books.grow(dict.fromkeys(group, 1))
    assert books.manager.pool.num_free == 12 - (2 + 3)
    assert books.swap_out(group)
    assert books.manager.pool.num_free == 12
    assert books.manager.host_pool.num_free == 8 - 5
    assert [state.refs for state in books.manager.table(lane)] == [3, 3, 1]
    assert books.swap_in(group)
    assert books.manager.host_pool.num_free == 8
    assert [state.refs for state in books.manager.table(twins[1])] == [3, 3, 1]
    books.grow(dict.fromkeys(group, 6))


def test_the_copy_names_whole_blocks_of_the_two_memories() -> None:
    books = BooksDriver(num_blocks=4, num_host_blocks=2, free_order=[3, 1, 0, 2])
    lane = books.compute(text(6), publish=False)
    out = books.manager.swap_out([lane])
    assert out is not None
    assert out.kind is CopyKind.SWAP_OUT
    assert out.src.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert out.dst.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_statistics_deaths_and_holes_travel() -> None:
    books = BooksDriver()
    lane = books.compute(text(10), publish=False)
    books.measure(lane, 5)
    books.evict({lane: [0, 3, 7]})
    books.swap_out([lane])
    books.evict({lane: [9]})  # a policy may go on while its tokens are away
    books.swap_in([lane])
    rows, positions = books.manager.tokens.live(lane)
    assert books.manager.tokens.columns[COLUMN][lane, rows].tolist() == [5 + p for p in positions.tolist()]
    assert books.manager.tokens.died_at(lane) == {0: 10, 3: 10, 7: 10, 9: 10}


def test_blocks_that_hold_nothing_are_not_worth_a_copy() -> None:
    books = BooksDriver()
    lane = books.admit(text(16))
    books.grow({lane: 6})
    books.evict({lane: [0, 1, 2, 3]})
    assert books.manager.swap_blocks([lane]).tolist() == books.blocks_of(lane)[1:2]
    assert books.swap_out([lane])
    assert books.manager.host_pool.num_free == 7
    assert books.swap_in([lane])
    assert len(books.blocks_of(lane)) == 1
    books.grow({lane: 9})


def test_what_others_hold_stays_on_the_device_for_them() -> None:
    books = BooksDriver()
    books.compute(text(9))
    lane = books.compute(text(9))
    assert books.swap_out([lane])
    assert books.swap_in([lane])
    assert not books.manager.pool.published[books.blocks_of(lane)].any(), "it came back into blocks of its own"
    books.grow({lane: 8}, publish=True)


def test_no_room_no_change() -> None:
    books = BooksDriver(num_blocks=6, num_host_blocks=2)
    lane = books.compute(text(9), publish=False)
    assert not books.swap_out([lane])  # three blocks; the driver sees to it that nothing changed
    books.evict({lane: [8]})
    assert books.swap_out([lane])
    other = books.compute(text(20), publish=False)
    assert not books.swap_in([lane])
    books.release([other])
    assert books.swap_in([lane])


def test_no_host_pool_no_swap() -> None:
    books = BooksDriver(num_host_blocks=0)
    assert not books.swap_out([books.compute(text(5))])


def test_swapping_in_may_forget_cached_blocks() -> None:
    books = BooksDriver(num_blocks=4)
    lane = books.compute(text(9), publish=False)
    books.swap_out([lane])
    books.release([books.compute(text(16))])
    assert books.manager.prefix.num_cached == 4
    assert books.swap_in([lane])
    assert books.manager.prefix.num_cached == 1


def test_a_lane_is_swapped_from_where_it_is_and_once() -> None:
    books = BooksDriver()
    lane, other = books.compute(text(5)), books.compute(text(7))
    with pytest.raises(ValueError, match="not all on the side they are to leave"):
        books.manager.swap_in([lane])
    with pytest.raises(ValueError, match="not all on the side they are to leave"):
        books.manager.swap_out([lane, lane])
    books.swap_out([lane])
    with pytest.raises(ValueError, match="not all on the side they are to leave"):
        books.manager.swap_out([other, lane])
    books.release([lane])
    with pytest.raises(ValueError, match="not all on the side they are to leave"):
        books.manager.swap_in([lane])
    assert books.manager.host_pool.num_free == 8
    assert not np.any(books.manager.host_pool.refs)
