"""V11: each reclaim decision leaves a record: blocks returned, bytes, estimated cost and value, verdict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes
from vtoken.memory.decisions import ReclaimDecision
from vtoken.memory.kv_cache_manager import KVCacheManager


def books_with(counts: list[list[int]], **settings: int) -> KVCacheManager:
    """Sequences with so many live tokens in each of their blocks of 4."""
    books = KVCacheManager(sum(map(len, counts)), 4, **settings)
    for live in counts:
        lane = books.admit(4 * len(live))
        assert lane is not None
        books.extend(books.plan_extend(np.array([lane]), np.array([4 * len(live)])))
        dead = np.array([4 * entry + offset for entry, n in enumerate(live) for offset in range(n, 4)], np.int64)
        books.evict(np.full(len(dead), lane), dead)
    return books


def test_packed() -> None:
    books = books_with([[1, 1, 1, 1], [4, 4, 1, 0], [2, 3, 2, 3]])
    books.decisions.step = 17
    found = books.reclaim([0, 1, 2], wanted=3, spare_cells=1, trigger="pressure")
    assert books.decisions.latest == found.decision
    assert found.decision == ReclaimDecision(
        number=0,
        step=17,
        trigger="pressure",
        num_lanes=3,
        blocks_wanted=3,
        blocks_returned=3,  # the dead one, and two for a token each
        tokens_copied=2,
        cost=2,
        value=12,
        verdict="packed",
    )


def test_dead_blocks() -> None:
    books = books_with([[4, 0, 3], [1, 1, 0]])
    decision = books.reclaim([0, 1], wanted=2, trigger="pressure").decision
    assert (decision.blocks_returned, decision.tokens_copied, decision.cost, decision.value) == (2, 0, 0, 8)
    assert decision.verdict == "dead_blocks"


def test_no_gain() -> None:
    books = books_with([[4, 4, 1], [3, 3]])
    decision = books.reclaim([0, 1], trigger="eviction").decision
    assert (decision.blocks_wanted, decision.blocks_returned, decision.cost, decision.value) == (None, 0, 0, 0)
    assert (decision.trigger, decision.verdict) == ("eviction", "no_gain")


def test_too_dear_says_what_was_turned_down() -> None:
    books = books_with([[3, 3, 3, 3], [2, 4, 2]], max_cost_per_block=1)
    decision = books.reclaim([0, 1], trigger="pressure").decision
    assert (decision.blocks_returned, decision.tokens_copied) == (0, 0)
    assert (decision.cost, decision.value, decision.verdict) == (2 + 3, 8, "too_dear")


def test_with_copies_beside_the_steps_the_blocks_to_come_are_counted() -> None:
    books = books_with([[1, 1, 0, 1]])
    found = books.reclaim([0], beside=True)
    assert found.num_blocks == 1
    assert (found.decision.blocks_returned, found.decision.tokens_copied, found.decision.value) == (3, 2, 12)
    [(_, copy)] = found.copies
    assert copy.ticket is not None
    books.finish(copy.ticket)
    assert books.usage().free_blocks == 3


@settings(max_examples=40)
@given(
    size=block_sizes(),
    kept=st.lists(st.booleans(), min_size=1, max_size=50),
    asked=st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 6)), st.booleans()), min_size=1, max_size=6),
)
def test_one_record_a_decision_and_its_figures_are_those_of_the_counters(
    size: int, kept: list[bool], asked: list[tuple[int | None, bool]]
) -> None:
    books = BooksDriver(size, num_blocks=18, check_books=False)
    counters, log = books.manager.counters, books.manager.decisions
    lanes = [books.compute([lane] * (3 * size), publish=False) for lane in range(4)]
    for number, (wanted, compact) in enumerate(asked, start=1):
        books.evict(
            {lane: [p for p in sorted(books.lanes[lane].live) if not kept[p * number % len(kept)]] for lane in lanes}
        )
        relocated, reclaimed = counters.tokens_relocated, counters.blocks_reclaimed
        books.reclaim(lanes, wanted=wanted, compact=compact)
        decision = log.latest
        assert decision is not None
        assert len(log) == sum(log.counts.values()) == counters.reclaim_plans == number
        assert decision.tokens_copied == decision.cost == counters.tokens_relocated - relocated
        assert decision.blocks_returned == counters.blocks_reclaimed - reclaimed
        assert decision.value == decision.blocks_returned * size
        assert (decision.verdict == "packed") == bool(decision.tokens_copied)
        assert (decision.verdict == "no_gain") == (decision.blocks_returned == 0)
