"""V23: waste is told apart: tail slack, holes, free blocks, cached ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes


def test_each_kind_by_hand() -> None:
    books = BooksDriver(4, num_blocks=12)
    lane = books.compute(list(range(10)), publish=False)
    books.release([books.compute(list(range(50, 58)))])  # two full blocks stay behind, cached
    reserved = books.admit(list(range(80, 84)))
    assert reserved is not None
    books.evict({lane: [1, 2, 6]})
    usage = books.manager.usage()
    assert (usage.free_blocks, usage.cached_blocks, usage.held_blocks) == (12 - 3 - 2 - 1, 2, 4)
    assert (usage.live_tokens, usage.holes, usage.tail_slack) == (7, 3, 2 + 4)
    assert (usage.retained_blocks, usage.reserved_blocks, usage.floor_blocks) == (4, 1, 2)


@settings(max_examples=40)
@given(
    size=block_sizes(),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    kept=st.lists(st.booleans(), min_size=1, max_size=40),
    leaves=st.booleans(),
    forks=st.booleans(),
)
def test_the_kinds_make_up_the_pool(size: int, lengths: list[int], kept: list[bool], leaves: bool, forks: bool) -> None:
    books = BooksDriver(size, num_blocks=220)
    lanes = [books.compute([i] * length) for i, length in enumerate(lengths)]
    if leaves:
        books.release([lanes.pop()])
    if forks and lanes:
        lanes.append(books.fork(lanes[0]))
    victims = {lane: [p for p in range(len(books.lanes[lane].values)) if not kept[p % len(kept)]] for lane in lanes}
    before = books.manager.usage()
    books.evict(victims)
    usage = books.manager.usage()
    cells = usage.num_blocks * size
    in_held = usage.live_tokens + usage.holes + usage.tail_slack
    assert in_held + (usage.free_blocks + usage.cached_blocks + usage.pinned_blocks) * size == cells
    # An eviction turns live cells into holes and nothing else into anything.
    assert before.live_tokens - usage.live_tokens == usage.holes - before.holes
    assert (usage.tail_slack, usage.free_blocks, usage.cached_blocks) == (
        before.tail_slack,
        before.free_blocks,
        before.cached_blocks,
    )
    assert usage.floor_blocks <= usage.retained_blocks - usage.reserved_blocks
