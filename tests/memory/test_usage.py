"""What `usage()` and the counters say, against books small enough to count by hand."""

from __future__ import annotations

from tests.memory.driver import BooksDriver


def text(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def test_an_empty_pool() -> None:
    usage = BooksDriver(num_blocks=6).manager.usage()
    assert (usage.free_blocks, usage.held_blocks, usage.cached_blocks, usage.pinned_blocks) == (6, 0, 0, 0)
    assert (usage.live_tokens, usage.holes, usage.tail_slack, usage.used_fraction) == (0, 0, 0, 0.0)


def test_waste_is_told_apart() -> None:
    books = BooksDriver(num_blocks=10)
    lane = books.compute(text(10), publish=False)
    twin = books.fork(lane)
    books.grow({lane: 1, twin: 1})  # the tail is copied: two blocks shared, two of their own
    books.evict({lane: [0, 5], twin: [5]})
    books.admit(text(5, first=50))
    books.release([books.compute(text(4, first=90))])
    usage = books.manager.usage()
    assert usage.held_blocks == 2 + 2 + 2
    assert usage.cached_blocks == 1
    assert usage.free_blocks == 10 - 7
    assert usage.shared_blocks == 2
    # Position 0 lives on in the twin, position 5 in nobody.
    assert usage.live_tokens == 4 + 3 + 3 + 3
    assert usage.holes == 1
    assert usage.tail_slack == 1 + 1 + 8
    assert usage.partly_used_blocks == 3
    # Alone: a tail each, and the two blocks that were just admitted; the tails hold three live tokens each.
    assert (usage.retained_blocks, usage.reserved_blocks, usage.floor_blocks) == (2 + 2, 2, 2)
    assert usage.used_fraction == 0.6


def test_blocks_that_only_a_running_copy_keeps_are_pinned() -> None:
    books = BooksDriver(num_blocks=6)
    lane = books.compute(text(9))
    copy = books.relocate(lane, [4, 5], [9, 10], beside=True)
    books.release([lane])
    usage = books.manager.usage()
    assert (usage.free_blocks, usage.cached_blocks, usage.pinned_blocks) == (3, 2, 1)
    assert usage.used_fraction == 1 / 6
    books.finish(copy.ticket)
    assert books.manager.usage().pinned_blocks == 0


def test_swapped_sequences_use_nothing_of_the_device() -> None:
    books = BooksDriver()
    lane = books.compute(text(9), publish=False)
    books.swap_out([lane])
    usage = books.manager.usage()
    assert usage.live_tokens == usage.held_blocks == usage.retained_blocks == usage.floor_blocks == 0


def test_retained_blocks_come_down_to_their_floor() -> None:
    books = BooksDriver()
    lane = books.compute(text(16), publish=False)
    books.evict({lane: [p for p in range(16) if p % 4]})
    usage = books.manager.usage()
    assert (usage.retained_blocks, usage.floor_blocks) == (4, 1)
    books.reclaim(lane)
    usage = books.manager.usage()
    assert (usage.retained_blocks, usage.floor_blocks) == (1, 1)


def test_blocks_are_counted_by_why_they_came_back() -> None:
    books = BooksDriver()
    counters = books.manager.counters
    lane = books.compute(text(16), publish=False)
    books.evict({lane: [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 13]})
    assert books.reclaim(lane, beside=True) == 1
    assert (counters.blocks_reclaimed_dead, counters.blocks_reclaimed_packed, counters.reclaim_plans) == (1, 0, 1)
    [ticket] = books.beside
    books.finish(ticket)
    assert (counters.blocks_reclaimed_dead, counters.blocks_reclaimed_packed) == (1, 1)
    assert counters.blocks_reclaimed == 2


def test_counters_count_what_happened() -> None:
    books = BooksDriver(num_blocks=8)
    counters = books.manager.counters
    lane = books.compute(text(10))
    twin = books.fork(lane)
    books.grow({lane: 1, twin: 1})
    assert (counters.forks, counters.blocks_copied_on_write, counters.tokens_copied_on_write) == (1, 1, 2)
    assert counters.blocks_taken == 3 + 1
    books.release([twin])
    books.evict({lane: [1, 2, 3, 5, 6, 7]})
    assert counters.tokens_evicted == 6
    assert books.reclaim(lane) == 1  # 1 + 1 + 3 live tokens need two blocks
    assert (counters.tokens_relocated, counters.blocks_reclaimed) == (1, 1)
    books.swap_out([lane])
    books.swap_in([lane])
    assert (counters.blocks_swapped_out, counters.blocks_swapped_in) == (2, 2)
    assert counters.prefix_query_tokens == 10
    assert counters.prefix_hit_tokens == 0
