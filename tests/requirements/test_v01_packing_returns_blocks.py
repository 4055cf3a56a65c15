"""V1: 4 blocks of 4 slots, one survivor each: evicting returns nothing, packing returns 3 blocks for 3 copies."""

from __future__ import annotations

import numpy as np

from tests.memory.driver import BooksDriver
from vtoken.memory.reclaim import plan_reclaim


def test_the_plan() -> None:
    plan = plan_reclaim(np.array([[1, 1, 1, 1]]), 4)
    assert (plan.reason, plan.num_copies, plan.num_blocks) == ("packed", 3, 3)
    assert plan.returned.sum() == 3


def test_in_the_books() -> None:
    books = BooksDriver(4, num_blocks=4)
    lane = books.compute(list(range(16)), publish=False)
    survivors = [2, 5, 8, 15]
    books.evict({lane: [p for p in range(16) if p not in survivors]})
    assert books.manager.pool.num_free == 0, "12 of 16 tokens are erased, and every block is still taken"
    assert books.reclaim(lane, compact=False) == 0, "without packing none comes back either"

    found = books.manager.reclaim([lane])
    [(moved, copy)] = found.copies
    assert (moved, len(copy), found.num_blocks) == (lane, 3, 3)
    books.store.run(copy)
    books.verify()
    assert books.manager.pool.num_free == 3
    assert books.manager.table(lane)[0].filled == 4
    # Another request can use them at once.
    assert books.compute(list(range(50, 62)), publish=False) is not None
