"""P9: copy on write at the divergence only: at most one block copied a fork."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes


@given(
    size=block_sizes(),
    length=st.integers(1, 50),
    num_forks=st.integers(1, 4),
    growth=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    kept=st.lists(st.booleans(), min_size=50, max_size=50),
)
def test_at_most_one_block_is_copied_a_fork(
    size: int, length: int, num_forks: int, growth: list[int], kept: list[bool]
) -> None:
    """Also of sequences with holes, and however far they go."""
    books = BooksDriver(size, num_blocks=160)
    lane = books.compute([i % 3 for i in range(length)], publish=False)
    books.evict({lane: [p for p in range(length) if not kept[p]]})
    family = [lane, *(books.fork(lane) for _ in range(num_forks))]
    for count in growth:
        books.grow(dict.fromkeys(family, count))
    counters = books.manager.counters
    assert counters.blocks_copied_on_write <= num_forks
    assert counters.tokens_copied_on_write <= num_forks * (size - 1)
    if not length % size:
        assert counters.blocks_copied_on_write == 0, "a full tail is not copied"


def test_the_writer_s_live_tokens_are_copied_and_no_more() -> None:
    books = BooksDriver(16)
    lane = books.compute(list(range(26)), publish=False)
    twin = books.fork(lane)
    books.evict({lane: [17, 20], twin: [25]})
    books.grow({lane: 1})
    assert books.manager.counters.tokens_copied_on_write == 8
    assert books.manager.table(twin)[1].filled == 9
