"""V2: survivors 4, 4, 4, 1 are 13 tokens and need 4 blocks: an empty plan, reason `no_gain`, nothing copied."""

from __future__ import annotations

import numpy as np

from tests.memory.driver import BooksDriver
from tests.memory.model import fingerprint
from vtoken.memory.reclaim import plan_reclaim


def test_the_plan() -> None:
    plan = plan_reclaim(np.array([[4, 4, 4, 1]]), 4)
    assert (plan.reason, plan.num_copies, plan.num_blocks) == ("no_gain", 0, 0)
    assert not plan.returned.any()


def test_in_the_books() -> None:
    books = BooksDriver(4, num_blocks=4)
    lane = books.compute(list(range(16)), publish=False)
    books.evict({lane: [12, 13, 15]})
    *before, _ = fingerprint(books.manager)
    found = books.manager.reclaim([lane])
    assert (found.copies, found.num_blocks, found.decision.verdict) == ((), 0, "no_gain")
    *after, _ = fingerprint(books.manager)
    assert after == before, "nothing but the counter of plans has changed"
    counters = books.manager.counters
    assert (counters.reclaim_plans, counters.tokens_relocated, counters.blocks_reclaimed) == (1, 0, 0)
