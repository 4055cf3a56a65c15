"""R10 (books): two requests interleave in one pool; a finished one's blocks are reused."""

from __future__ import annotations

from tests.memory.driver import BooksDriver


def test_two_requests_interleave_and_a_third_takes_over() -> None:
    books = BooksDriver(4, num_blocks=6, free_order=[5, 0, 3, 1, 4, 2])
    a = books.compute(list(range(7)), publish=False)
    b = books.compute(list(range(50, 53)), publish=False)
    assert (books.blocks_of(a), books.blocks_of(b)) == ([5, 0], [3])
    for _ in range(3):
        books.grow({a: 1, b: 1})
    assert (books.blocks_of(a), books.blocks_of(b)) == ([5, 0, 1], [3, 4])
    books.release([a])
    c = books.compute(list(range(90, 101)), publish=False)
    assert sorted(books.blocks_of(c)) == [0, 1, 5]
    books.grow({b: 1, c: 1})
