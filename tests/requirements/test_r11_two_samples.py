"""R11: two samples of one prompt, as in the PagedAttention paper, figure 8."""

from __future__ import annotations

from tests.memory.driver import BooksDriver


def test_the_first_writer_copies_and_the_second_writes_in_place() -> None:
    books = BooksDriver(4, num_blocks=8, free_order=[7, 1, 3, 0, 2, 4, 5, 6])
    one = books.compute(list(range(7)), publish=False)
    two = books.fork(one)
    assert books.blocks_of(one) == books.blocks_of(two) == [7, 1]
    assert books.manager.pool.refs[[7, 1]].tolist() == [2, 2]

    extension = books.grow({one: 1, two: 1})
    [copy] = extension.copies
    assert copy.src.tolist() == [4, 5, 6]
    assert copy.dst.tolist() == [12, 13, 14]
    assert (books.blocks_of(one), books.blocks_of(two)) == ([7, 3], [7, 1])
    assert books.manager.pool.refs[[7, 1, 3]].tolist() == [2, 1, 1]
    assert extension.slots.tolist() == [3 * 4 + 3, 1 * 4 + 3]


def test_one_after_the_other_it_is_the_same() -> None:
    books = BooksDriver(4, num_blocks=8, free_order=[7, 1, 3, 0, 2, 4, 5, 6])
    one = books.compute(list(range(7)), publish=False)
    two = books.fork(one)
    assert len(books.grow({one: 1}).copies) == 1
    assert not books.grow({two: 1}).copies
    assert (books.blocks_of(one), books.blocks_of(two)) == ([7, 3], [7, 1])
