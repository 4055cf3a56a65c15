"""U06: over hundreds of requests no block is lost, none comes back twice, and nothing is held when nobody is there."""

from __future__ import annotations

import random

import pytest

from tests.memory.driver import BooksDriver


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_u06_soak(prefix_caching: bool) -> None:
    """500 requests with 1 to 3 samples each: some aborted, some swapped, some evicted from, some in failed steps."""
    draw = random.Random(6)
    books = BooksDriver(4, 40, 20, enable_prefix_caching=prefix_caching, check_shadow=False)
    pool, prefix = books.manager.pool, books.manager.prefix
    for request in range(500):
        lane = books.admit([draw.choice((0, 1)) for _ in range(draw.randint(1, 24))])
        if lane is None or books.is_busy(lane):  # full: the oldest goes
            books.release([next(iter(books.lanes))])
            continue
        rest = max(1, len(books.lanes[lane].text) - len(books.lanes[lane].values))
        if books.extend({lane: rest}, publish=True) is not None:
            books.run_step(fails=draw.random() < 0.1)
        if lane in books.lanes and draw.random() < 0.3:
            books.fork(lane)
        for other in [other for other in books.idle if draw.random() < 0.3]:
            live = sorted(books.lanes[other].live)
            books.evict({other: [p for p in live if draw.random() < 0.4]})
            books.reclaim(other, beside=draw.random() < 0.3)
        if books.idle:
            books.extend(dict.fromkeys(draw.sample(books.idle, draw.randint(1, len(books.idle))), 1), publish=True)
            books.run_step()
        if draw.random() < 0.2 and books.idle:
            books.swap_out([draw.choice(books.idle)])
        if draw.random() < 0.2 and books.swapped:
            books.swap_in(books.swapped)
        for ticket in [ticket for ticket in books.beside if draw.random() < 0.5]:
            books.finish(ticket)
        books.release([lane for lane in books.lanes if draw.random() < 0.25])
        held = int((pool.refs > 0).sum())
        pinned = int(((pool.refs == 0) & (pool.pins > 0) & ~pool.published).sum())
        assert pool.num_free + held + prefix.num_cached + pinned == pool.num_blocks, f"after request {request}"
    assert books.manager.counters.blocks_taken > 1000
    books.finish_all()
