"""X6: retained blocks within one block of `ceil(live / B)` a sequence in blocks it does not share, after a reclaim."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes


def own_blocks(books: BooksDriver, lane: int) -> tuple[int, int]:
    """(blocks that the lane holds alone, live tokens in them); those that wait for its next tokens aside."""
    num_rows = books.manager.tokens.num_rows[lane]
    table = books.manager.table(lane)
    alone = [state for state in table if state.refs == 1 and state.entry * books.block_size < num_rows]
    return len(alone), sum(state.filled for state in alone)


@settings(max_examples=40)
@given(
    size=block_sizes(),
    reuses=st.booleans(),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    common=st.integers(0, 2),
    share_erased=st.sampled_from((0.1, 0.3, 0.5, 0.7, 0.95, 1.0)),
    spare=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_every_sequence_is_brought_to_its_floor(
    size: int, reuses: bool, lengths: list[int], common: int, share_erased: float, spare: int, seed: int
) -> None:
    """Random victims of sequences that share a beginning or a fork: they come down together."""
    draw = random.Random(seed)
    books = BooksDriver(size, num_blocks=140, reuse_cells=reuses, check_books=False)
    lanes = [books.compute([9] * (common * size) + [i] * length) for i, length in enumerate(lengths)]
    lanes.append(books.fork(lanes[0]))
    books.grow(dict.fromkeys(lanes, 3))
    for _ in range(3):
        books.evict(
            {lane: [p for p in sorted(books.lanes[lane].live) if draw.random() < share_erased] for lane in lanes}
        )
        books.reclaim(lanes, spare_cells=spare)
        for lane in lanes:
            num_own, num_live = own_blocks(books, lane)
            assert num_own <= -(-(num_live + spare) // size), f"{num_own} blocks for {num_live} live tokens"
        usage = books.manager.usage()
        assert usage.retained_blocks - usage.reserved_blocks == sum(own_blocks(books, lane)[0] for lane in lanes)
        assert not usage.reserved_blocks or not reuses
        assert usage.floor_blocks == sum(-(-own_blocks(books, lane)[1] // size) for lane in lanes)
        if not spare:
            assert usage.retained_blocks == usage.floor_blocks
        books.grow(dict.fromkeys(lanes, draw.randint(1, size)))


def test_asked_for_fewer_blocks_it_stops_there() -> None:
    books = BooksDriver(4, num_blocks=16)
    lanes = [books.compute([i] * 16, publish=False) for i in range(4)]
    books.evict({lane: [p for p in range(16) if p % 4] for lane in lanes})
    assert books.manager.usage().floor_blocks == 4
    for num_held in (14, 12, 10, 8, 6, 4, 4):
        books.reclaim(lanes, wanted=2)
        assert books.manager.usage().retained_blocks == num_held
