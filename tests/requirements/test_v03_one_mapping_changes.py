"""V3: moving a token from slot 1 of block B to slot 2 of block A changes one mapping, and the next read follows it."""

from __future__ import annotations

import numpy as np

from tests.memory.driver import BooksDriver
from tests.memory.model import COLUMN

A, B = 6, 3


def test_one_token_moves_and_nothing_else_changes() -> None:
    books = BooksDriver(4, num_blocks=8, free_order=[A, B, 0, 1, 2, 4, 5, 7])
    lane = books.compute(list(range(8)), publish=False)
    books.measure(lane, 100)
    books.evict({lane: [2]})
    tokens = books.manager.tokens

    def seen_by_policy() -> list[tuple[int, float]]:
        """What a policy is shown: the live positions and their statistics, in the order of the text."""
        rows, positions = tokens.live(lane)
        return list(zip(positions.tolist(), tokens.columns[COLUMN][lane, rows].tolist(), strict=True))

    live = sorted(books.lanes[lane].live)
    slots, seen = {p: tokens.slot_of(lane, p) for p in live}, seen_by_policy()
    pools, blocks = books.manager.pool.refs.copy(), books.blocks_of(lane)
    assert slots[5] == B * 4 + 1

    copy = books.relocate(lane, [5], [2])
    assert (copy.src.tolist(), copy.dst.tolist()) == ([B * 4 + 1], [A * 4 + 2])
    assert {p: tokens.slot_of(lane, p) for p in live} == {**slots, 5: A * 4 + 2}
    assert seen_by_policy() == seen
    assert np.array_equal(books.manager.pool.refs, pools)
    assert books.blocks_of(lane) == blocks

    # The next step's snapshot names the new cell and no longer the old one, and finds the token's value there.
    extension = books.grow({lane: 1})
    assert extension.past_masks[0, :2, 0].tolist() == [0b1111, 0b1101]
    assert books.store.device[A * 4 + 2] == books.lanes[lane].values[5]
