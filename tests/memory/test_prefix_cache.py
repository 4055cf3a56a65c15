"""Publish, match, forget: what a later text may start from, and what it never may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.memory.model import fingerprint
from tests.strategies import Document, block_sizes, documents
from vtoken.memory import prefix_cache
from vtoken.memory.prefix_cache import BlockHashes


def text(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def num_matched(books: BooksDriver, tokens: list[int], salt: int = 0) -> int:
    return len(books.manager.match(books.hashes(tokens, salt), len(tokens) - 1))


# --- match ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (30, 3)])
def test_u31_something_is_always_left_to_compute(num_tokens: int, blocks: int) -> None:
    """At most floor((P - 1) / B) blocks match, also when the prompt is exactly as long as the cached blocks."""
    books = BooksDriver()
    books.release([books.compute(text(12))])
    lane = books.admit(text(num_tokens))
    assert books.manager.tokens.lengths[lane] == 4 * blocks < num_tokens


@given(size=block_sizes(), first=documents(), second=documents())
def test_as_many_blocks_match_as_the_texts_have_in_common(size: int, first: Document, second: Document) -> None:
    books = BooksDriver(size, num_blocks=12, check_shadow=False)
    one, two = first.tokens(size), second.tokens(size)
    books.compute(one)
    common = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert num_matched(books, two) == min(common, len(two) - 1) // size


def test_matching_changes_nothing() -> None:
    books = BooksDriver()
    books.release([books.compute(text(12))])
    before = fingerprint(books.manager)
    assert num_matched(books, text(12)) == 2
    assert fingerprint(books.manager) == before


def test_matched_blocks_are_not_computed_and_not_taken_again() -> None:
    books = BooksDriver(num_blocks=4)
    books.compute(text(12))
    lane = books.admit(text(12))  # two blocks shared, one of its own: four in all
    assert lane is not None
    assert books.manager.pool.refs.tolist() == [2, 2, 1, 1]
    assert books.manager.counters.prefix_query_tokens == 24
    assert books.manager.counters.prefix_hit_tokens == 8


def test_blocks_of_the_same_plan_match_while_they_are_pending() -> None:
    books = BooksDriver()
    first = books.admit(text(8))
    books.extend({first: 8}, publish=True)
    second = books.admit(text(10))
    assert books.blocks_of(second)[:2] == books.blocks_of(first)
    books.run_step()


def test_a_failed_step_leaves_nothing_to_match() -> None:
    books = BooksDriver()
    books.release([books.compute(text(4))])
    lane = books.admit(text(12))
    books.extend({lane: 8}, publish=True)
    assert num_matched(books, text(12)) == 2
    books.run_step(fails=True)
    assert num_matched(books, text(12)) == 1, "what an earlier step computed stays"
    assert books.manager.prefix.num_pending == 0
    books.compute(text(12))


def test_prefix_caching_can_be_switched_off() -> None:
    books = BooksDriver(enable_prefix_caching=False)
    books.compute(text(12))
    assert num_matched(books, text(12)) == 0
    assert not books.manager.pool.published.any()
    assert books.manager.counters.prefix_query_tokens == 0


def test_a_sequence_publishes_no_more_after_its_first_eviction_and_neither_do_its_forks() -> None:
    books = BooksDriver()
    lane = books.compute(text(8))
    books.fork(lane)  # keeps both blocks shared, so that the hole is not reused and rows stay in order
    books.evict({lane: [1]})
    twin = books.fork(lane)
    books.grow({lane: 8, twin: 8}, publish=True)
    assert books.manager.tokens.in_order[[lane, twin]].all()
    assert len(books.manager.prefix) == 2


def test_unpublish_takes_back_all_that_the_lane_stands_on_wherever_it_lies() -> None:
    books = BooksDriver()
    books.compute(text(4))
    lane = books.compute(text(14))  # one block matched, two computed
    assert books.swap_out([lane])
    assert books.swap_in([lane])
    assert num_matched(books, text(14)) == 3
    books.unpublish(lane)
    assert num_matched(books, text(14)) == 0
    books.grow({lane: 8}, publish=True)
    assert num_matched(books, text(14)) == 0


# --- tenants, hashes --------------------------------------------------------------------------------------------------


def test_u81_tenants_never_share() -> None:
    books = BooksDriver()
    books.release([books.compute(text(9), salt=1)])
    assert num_matched(books, text(9), salt=2) == 0
    assert num_matched(books, text(9)) == 0
    assert num_matched(books, text(9), salt=1) == 2


def test_the_empty_salt_is_a_tenant_too() -> None:
    keys = []
    for salt in (None, "", "a"):
        hashes = BlockHashes(4, salt)
        hashes.extend(text(4), 4)
        keys.append(hashes.keys[0])
    assert len(set(keys)) == 3
    assert "secret" not in repr(vars(BlockHashes(4, "secret"))), "a salt is not kept"


def test_texts_that_turn_by_other_lengths_never_share() -> None:
    keys = set()
    for salt in (None, "", "rope length 40"):
        for length in (None, 40, 41, 80):
            hashes = BlockHashes(4, salt, length)
            hashes.extend(text(8), 8)
            keys |= set(hashes.copy().keys)
    assert len(keys) == 2 * 3 * 4


def test_u81_with_equal_hashes_the_tokens_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "chain_hash", lambda parent, tokens: b"always the same")
    books = BooksDriver()
    books.compute(text(12))
    assert len(books.manager.prefix) == 1, "the key is taken, so the second block cannot be entered"
    assert num_matched(books, text(12)) == 1
    assert num_matched(books, text(12, first=50)) == 0
    # The same tokens further on in a text are not the same KV.
    assert num_matched(books, text(4, first=50) + text(8)) == 0
    assert num_matched(books, text(4) + text(8)) == 1
    books.compute(text(12, first=50))
    assert num_matched(books, text(12, first=50)) == 0
    books.compute(text(4) + text(8))


def test_a_block_is_known_by_all_that_comes_before_it() -> None:
    one, two = BlockHashes(4), BlockHashes(4)
    one.extend([1, 2, 3, 4, 9, 9, 9, 9], 8)
    two.extend([1, 2, 3, 5, 9, 9, 9, 9], 8)
    assert one.tokens[1] == two.tokens[1]
    assert one.keys[1] != two.keys[1]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=6), block_sizes())
def test_hashes_do_not_depend_on_how_a_text_grew(tokens: list[int], steps: list[int], size: int) -> None:
    whole, grown = BlockHashes(size, "x"), BlockHashes(size, "x")
    whole.extend(tokens, len(tokens))
    for step in sorted(step for step in steps if step <= len(tokens)):
        grown.extend(tokens, step)
        assert len(grown) == step // size
    grown = grown.copy()
    grown.extend(tokens, len(tokens))
    assert (grown.keys, grown.tokens) == (whole.keys, whole.tokens)


def test_a_copy_of_hashes_goes_on_by_itself() -> None:
    one = BlockHashes(4)
    one.extend(text(4), 4)
    two = one.copy()
    two.extend(text(8), 8)
    assert (len(one), len(two)) == (1, 2)


# --- forget -----------------------------------------------------------------------------------------------------------


def test_u61_the_tail_is_forgotten_first() -> None:
    books = BooksDriver(num_blocks=3)
    lane = books.compute(text(12))
    chain = books.blocks_of(lane)
    books.release([lane])
    assert books.manager.prefix.cached_blocks == chain[::-1]
    books.compute(text(3, first=50))  # takes one block
    assert num_matched(books, text(13)) == 2
    assert books.manager.counters.blocks_forgotten == 1


def test_u61_a_match_stops_at_the_first_gap() -> None:
    books = BooksDriver()
    lane = books.compute(text(12))
    first = books.blocks_of(lane)[0]
    books.release([lane])
    books.manager.prefix.forget_block(first)
    assert num_matched(books, text(13)) == 0
    books.manager.check()
    # What could only be reached through it went too, so nothing is cached in vain.
    assert books.manager.prefix.num_cached == len(books.manager.prefix) == 0
    books.compute(text(13))


def test_what_is_in_use_when_its_beginning_is_forgotten_is_not_matched_but_stays_its_holders() -> None:
    books = BooksDriver()
    lane = books.compute(text(12))
    books.manager.prefix.forget_block(books.blocks_of(lane)[0])
    books.manager.check()
    books.verify()
    assert num_matched(books, text(13)) == 0
    books.grow({lane: 4}, publish=True)
    assert len(books.manager.prefix) == 0, "its chain is broken: nothing it published could be matched"


def test_the_least_recently_used_is_forgotten_first() -> None:
    books = BooksDriver(num_blocks=4)
    for first in (0, 10, 20):
        books.release([books.compute(text(4, first))])
    lane = books.admit(text(5))  # a hit: the oldest is the newest now
    books.release([lane])
    books.compute(text(8, first=50))  # wants two blocks, one is free
    assert [num_matched(books, text(5, first)) for first in (0, 10, 20)] == [1, 0, 1]


def test_a_prefix_whose_holder_moved_on_is_forgotten_first() -> None:
    books = BooksDriver(num_blocks=6)
    books.release([books.compute(text(4, first=10))])
    lane = books.compute(text(9))
    books.evict({lane: list(range(8))})
    moved_on = books.blocks_of(lane)[:2]
    assert books.reclaim(lane) == 2
    oldest = books.manager.prefix.cached_blocks[:2]
    assert oldest == moved_on[::-1], "before older entries, tail first"


def test_admission_never_forgets_what_it_matched() -> None:
    books = BooksDriver(num_blocks=4)
    books.release([books.compute(text(8))])
    books.release([books.compute(text(8, first=50))])
    lane = books.admit(text(16))
    assert lane is not None
    assert books.manager.tokens.lengths[lane] == 8
    assert num_matched(books, text(9, first=50)) == 0


def test_a_block_that_a_copy_touches_is_not_forgotten_for_its_space() -> None:
    books = BooksDriver(num_blocks=4)
    lane = books.compute(text(9))
    copy = books.relocate(lane, [4, 5], [9, 10], beside=True)  # the second published block is its source
    source = books.blocks_of(lane)[1]
    books.release([lane])
    assert books.manager.prefix.cached_blocks == [source, books.manager.prefix.cached_blocks[1]]
    assert books.manager.num_available == 2, "the source is cached but cannot be handed out, the target is pinned"
    assert books.compute(text(8, first=50)) is not None
    assert books.manager.pool.published[source] or books.manager.pool.refs[source] == 0
    assert books.admit(text(4, first=80)) is None
    books.finish(copy.ticket)
    assert books.admit(text(4, first=80)) is not None


def test_using_a_cached_block_that_a_copy_touches_takes_nothing_away() -> None:
    """Such a block counts for nothing while it is cached, so admission must not count it either."""
    books = BooksDriver(num_blocks=4)
    lane = books.compute(text(9))
    copy = books.relocate(lane, [4, 5], [9, 10], beside=True)
    books.release([lane])
    assert books.manager.num_available == 2  # the first block, cached, and one that is free
    again = books.admit(text(12))
    assert again is not None
    assert books.manager.num_available == 0
    books.finish(copy.ticket)


def test_withdrawing_twice_and_committing_nothing_are_harmless() -> None:
    books = BooksDriver()
    lane = books.admit(text(8))
    books.extend({lane: 8}, publish=True)
    books.run_step(fails=True)
    books.manager.withdraw()
    books.manager.commit()
    books.manager.check()
    assert not np.any(books.manager.pool.published)
