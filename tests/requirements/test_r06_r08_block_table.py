"""R6-R8: the block table with fill counts, step by step as in the PagedAttention paper, figure 6."""

from __future__ import annotations

from tests.memory.driver import BooksDriver


def test_the_published_example() -> None:
    books = BooksDriver(4, num_blocks=9, free_order=[7, 1, 3, 0, 2, 4, 5, 6, 8])

    def table() -> list[tuple[int, int]]:
        return [(state.block, state.filled) for state in books.manager.table(lane)]

    lane = books.compute(list(range(7)), publish=False)  # "Four score and seven years ago our"
    assert table() == [(7, 4), (1, 3)]
    first = books.grow({lane: 1})
    assert first.slots.tolist() == [1 * 4 + 3]
    assert table() == [(7, 4), (1, 4)]
    second = books.grow({lane: 1})
    assert second.slots.tolist() == [3 * 4]
    assert table() == [(7, 4), (1, 4), (3, 1)]
    assert [state.entry for state in books.manager.table(lane)] == [0, 1, 2]
