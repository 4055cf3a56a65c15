"""C1, C4: every operation of the books at every block size from 4 to 256."""

from __future__ import annotations

import pytest

from tests.memory.driver import BooksDriver


@pytest.mark.parametrize("size", [*range(4, 34), 48, 63, 64, 65, 96, 128, 255, 256])
def test_a_life_in_blocks_of_any_size(size: int) -> None:
    """The driver checks the books and each token's cell after every line."""
    books = BooksDriver(size, num_blocks=14, num_host_blocks=8)
    lane = books.compute([i % 3 for i in range(2 * size + 1)])
    twin = books.fork(lane)
    books.grow({lane: size, twin: 1}, publish=True)
    books.measure(twin, 7)
    books.evict({twin: list(range(0, 2 * size, 2)), lane: [size + 1]})
    books.grow({twin: 2})
    assert books.swap_out([lane, twin])
    assert books.swap_in([twin, lane])
    assert [state.refs for state in books.manager.table(lane)][:2] == [2, 2]
    books.release([lane])
    books.reclaim(twin)
    live = int(books.manager.tokens.num_live[twin])
    assert live == size + 4
    assert len(books.blocks_of(twin)) == -(-live // size)
    books.evict({twin: [1]})
    rows, cells = books.movable(twin)
    copy = books.relocate(twin, rows[-1:], cells[:1], beside=True)
    books.grow({twin: 1})
    books.finish(copy.ticket)
    again = books.admit([i % 3 for i in range(2 * size + 1)])
    assert books.manager.tokens.lengths[again] == 2 * size, "both blocks of the prompt were cached when they were left"
    books.finish_all()
