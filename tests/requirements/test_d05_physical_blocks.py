"""D5: 40 tokens lie in blocks 0, 3, 5 as 16 + 16 + 8, 20 tokens in blocks 1, 2."""

from __future__ import annotations

from tests.memory.driver import BooksDriver


def test_the_published_example() -> None:
    books = BooksDriver(16, num_blocks=6, free_order=[0, 3, 5, 1, 2, 4])
    a = books.compute(list(range(40)), publish=False)
    b = books.compute(list(range(20)), publish=False)
    assert [(state.block, state.filled) for state in books.manager.table(a)] == [(0, 16), (3, 16), (5, 8)]
    assert [(state.block, state.filled) for state in books.manager.table(b)] == [(1, 16), (2, 4)]
    assert books.manager.tokens.slot_of(a, 39) == 5 * 16 + 7
    assert books.manager.pool.free_blocks.tolist() == [4]
