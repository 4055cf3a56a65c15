"""V2: survivors 4, 4, 4, 1 are 13 tokens and need 4 blocks: an empty plan, reason `no_gain`, nothing copied."""

from __future__ import annotations

import numpy as np

from tests.memory.driver import BooksDriver
from tests.memory.model import fingerprint
from vtoken.memory.reclaim import plan_reclaim


def test_the_plan() -> None:
    plan = plan_reclaim(np.array([4, 4, 4, 1], np.int32), 4)
    assert (plan.reason, plan.num_copies, len(plan.empty), len(plan.keep)) == ("no_gain", 0, 0, 4)


def test_in_the_books() -> None:
    books = BooksDriver(4, num_blocks=4)
    lane = books.compute(list(range(16)), publish=False)
    books.evict({lane: [12, 13, 15]})
    before = fingerprint(books.manager)
    assert books.manager.reclaim(lane) == (None, 0)
    assert fingerprint(books.manager) == before
