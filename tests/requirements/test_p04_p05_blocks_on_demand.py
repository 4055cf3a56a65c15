"""P4-P5: fixed blocks through a block table: one at first, another when full, any physical place, all returned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes


@given(size=block_sizes(), num_tokens=st.integers(1, 70), order=st.permutations(range(20)))
def test_a_sequence_takes_a_block_when_the_last_is_full_and_returns_all(
    size: int, num_tokens: int, order: list[int]
) -> None:
    books = BooksDriver(size, num_blocks=20, free_order=order, check_books=False, check_shadow=False)
    lane = books.admit([1] * num_tokens, num_tokens=0)
    for length in range(1, num_tokens + 1):
        if -(-length // size) > 20:
            break
        extension = books.grow({lane: 1})
        # As many blocks as the tokens so far need, wherever the pool has them.
        assert books.blocks_of(lane) == order[: -(-length // size)]
        block, offset = divmod(int(extension.slots[0]), size)
        assert (block, offset) == (order[(length - 1) // size], (length - 1) % size)
    books.manager.check()
    books.release([lane])
    assert books.manager.pool.num_free == 20
