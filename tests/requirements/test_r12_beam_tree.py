"""R12: beam search with four beams, as in the PagedAttention paper, figure 9."""

from __future__ import annotations

import numpy as np

from tests.memory.driver import BooksDriver

# Before the step: candidates 0 to 2 share blocks 1 and 3, then diverge; candidate 3 has gone its own way after block 0.
BEFORE = [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
AFTER = [[0, 1, 3, 6, 9], [0, 1, 3, 6, 10], [0, 1, 3, 7, 11], [0, 1, 3, 7, 12]]


def tree() -> tuple[BooksDriver, list[int]]:
    """The tree of the figure, four full blocks a candidate, grown as a search grows it."""
    # Blocks in the order in which the growth below takes them; then those of the next step.
    books = BooksDriver(4, num_blocks=13, free_order=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    first = books.compute(list(range(4)), publish=False)
    fourth = books.fork(first)
    for _ in range(4):  # their second blocks: 1 and 2
        books.grow({first: 1, fourth: 1})
    for _ in range(4):  # their third: 3 and 4
        books.grow({first: 1, fourth: 1})
    second, third = books.fork(first), books.fork(first)
    for _ in range(4):  # the fourth of all: 5 to 8
        books.grow({first: 1, second: 1, third: 1, fourth: 1})
    lanes = [first, second, third, fourth]
    assert [books.blocks_of(lane) for lane in lanes] == BEFORE
    return books, lanes


def test_the_published_tree() -> None:
    """All four best continuations come from candidates 1 and 2: blocks 2, 4, 5 and 8 are freed, 9 to 12 taken."""
    books, (zero, one, two, three) = tree()
    assert books.manager.pool.refs[[0, 1, 3]].tolist() == [4, 3, 3]
    free = books.manager.num_available
    books.release([zero, three])
    assert books.manager.num_available == free + 4
    assert books.manager.pool.refs[[2, 4, 5, 8]].tolist() == [0, 0, 0, 0]
    lanes = [one, books.fork(one), two, books.fork(two)]
    assert books.manager.num_available == free + 4, "a fork takes no block"
    # The last ones freed are handed out first, here to somebody else; so the candidates get those of the figure.
    other = books.compute(list(range(100, 116)), publish=False)
    assert sorted(books.blocks_of(other)) == [2, 4, 5, 8]
    extension = books.grow(dict.fromkeys(lanes, 1))
    assert not extension.copies, "a full block is never copied"
    found = [books.blocks_of(lane) for lane in lanes]
    assert [blocks[:4] for blocks in found] == [blocks[:4] for blocks in AFTER]
    assert sorted(blocks[4] for blocks in found) == [9, 10, 11, 12]
    assert books.manager.pool.refs[[0, 1, 3, 6, 7]].tolist() == [4, 4, 4, 2, 2]
    books.release([*lanes, other])
    assert books.manager.num_available == 13


def test_only_an_old_shared_block_is_copied() -> None:
    """Inside a block: of two that share it the first to write copies it, once; the other goes on in place."""
    books, (zero, one, two, three) = tree()
    lanes = [zero, one, two, three]
    books.grow(dict.fromkeys(lanes, 2))  # a fifth block each, half full
    books.release([zero, three])
    lanes = [one, books.fork(one), two, books.fork(two)]
    extension = books.grow(dict.fromkeys(lanes, 1))
    copied = {int(block) for copy in extension.copies for block in np.unique(copy.dst // 4)}
    assert len(copied) == 2, "one block for each divergence"
    assert not books.grow(dict.fromkeys(lanes, 1)).copies, "what is not shared is written in place"
