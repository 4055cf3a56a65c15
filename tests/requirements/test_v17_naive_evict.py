"""V17: the baseline Naive-Evict: tokens are removed logically, fully dead blocks return, nothing is packed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes


@given(size=block_sizes(), num_blocks=st.integers(1, 8), kept=st.lists(st.booleans(), min_size=1, max_size=300))
def test_only_fully_dead_blocks_return(size: int, num_blocks: int, kept: list[bool]) -> None:
    books = BooksDriver(size, num_blocks=8)
    length = num_blocks * size
    lane = books.compute([1] * length, publish=False)
    victims = [p for p in range(length) if not kept[p % len(kept)]]
    books.evict({lane: victims})
    dead = [e for e in range(num_blocks) if set(range(e * size, (e + 1) * size)) <= set(victims)]
    slots = {p: books.manager.tokens.slot_of(lane, p) for p in books.lanes[lane].live}
    assert books.reclaim(lane, compact=False) == len(dead)
    assert books.manager.pool.num_free == 8 - num_blocks + len(dead)
    assert {p: books.manager.tokens.slot_of(lane, p) for p in slots} == slots, "no survivor has moved"
    assert books.manager.counters.tokens_relocated == 0


def test_one_survivor_holds_a_block_that_packing_would_return() -> None:
    naive, packing = BooksDriver(4, num_blocks=4), BooksDriver(4, num_blocks=4)
    for books in (naive, packing):
        books.compute(list(range(16)), publish=False)
        books.evict({0: [p for p in range(16) if p not in (0, 5, 10)]})
    assert naive.reclaim(0, compact=False) == 1
    assert packing.reclaim(0) == 3


@settings(max_examples=40)
@given(size=block_sizes(), steps=st.integers(1, 25), kept=st.lists(st.booleans(), min_size=1, max_size=30))
def test_dead_cells_are_not_used_again(size: int, steps: int, kept: list[bool]) -> None:
    """The arm `naive`: what a text ever was long is what it takes, blocks that died as a whole aside."""
    books = BooksDriver(size, num_blocks=60, reuse_cells=False, check_shadow=False)
    lane = books.compute([1] * size, publish=False)
    for step in range(steps):
        books.grow({lane: 1 + step % 3})
        live = sorted(books.lanes[lane].live)[:-1]
        books.evict({lane: [p for p in live if not kept[(p + step) % len(kept)]]})
        books.reclaim(lane, compact=False)
        positions = sorted(books.lanes[lane].live)
        assert books.manager.tokens.rows_of(lane, positions).tolist() == positions, "a token lies where it was written"
        assert len(books.blocks_of(lane)) == len({p // size for p in positions})
    assert books.manager.counters.tokens_relocated == 0
