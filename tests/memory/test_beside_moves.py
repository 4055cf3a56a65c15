"""Copies beside a step: copied, then mapped, then reused, whatever happens to the sequence meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from tests.memory.driver import BooksDriver
from vtoken.memory.copy import CopyKind


def text(num_tokens: int) -> list[int]:
    return [i % 3 for i in range(num_tokens)]


def holey(num_blocks: int = 8) -> tuple[BooksDriver, int]:
    """A sequence with one survivor in each of four blocks."""
    books = BooksDriver(num_blocks=num_blocks)
    lane = books.compute(text(16), publish=False)
    books.evict({lane: [p for p in range(16) if p % 4]})
    return books, lane


def test_the_map_is_switched_and_blocks_return_only_when_the_copy_has_ended() -> None:
    books, lane = holey()
    before = books.manager.blocks.ids[lane].copy(), books.manager.blocks.masks[lane].copy()
    assert books.reclaim(lane, beside=True) == 0
    [ticket] = books.beside
    copy = books.beside[ticket].copy
    assert (copy.kind, copy.ticket, len(copy)) == (CopyKind.RELOCATE, ticket, 3)
    books.run_beside(ticket, 2)
    assert np.array_equal(books.manager.blocks.ids[lane], before[0])
    assert np.array_equal(books.manager.blocks.masks[lane], before[1])
    assert books.manager.pool.num_free == 4
    books.finish(ticket)
    assert books.manager.pool.num_free == 7
    assert len(books.blocks_of(lane)) == 1


def test_a_sequence_with_moves_under_way_grows_elsewhere() -> None:
    books, lane = holey()
    books.reclaim(lane, beside=True)
    [ticket] = books.beside
    extension = books.grow({lane: 2})
    # One cell of the kept block is neither source nor target nor live; the second token needs a block.
    assert extension.rows.tolist() == [16, 17]
    books.finish(ticket)
    assert len(books.blocks_of(lane)) == 2


def test_tokens_that_died_meanwhile_are_skipped() -> None:
    books, lane = holey()
    books.reclaim(lane, beside=True)
    [ticket] = books.beside
    books.evict({lane: [4, 12]})
    books.finish(ticket)
    assert sorted(books.lanes[lane].live) == [0, 8]
    assert len(books.blocks_of(lane)) == 1


@pytest.mark.parametrize("leave", ["release", "swap_out", "fork"])
def test_a_dropped_move_changes_no_map_but_keeps_its_cells(leave: str) -> None:
    books, lane = holey()
    books.reclaim(lane, beside=True)
    [ticket] = books.beside
    pinned = np.flatnonzero(books.manager.pool.pins)
    assert len(pinned) == 4
    if leave == "fork":
        books.fork(lane)
    else:
        getattr(books, leave)([lane])
        assert books.manager.usage().pinned_blocks == 4
        assert books.manager.num_available == 4
    assert books.lane_of_ticket(ticket) is None
    other = books.compute(text(13), publish=False)
    assert not set(books.blocks_of(other)) & set(pinned.tolist())
    rows = {lane: books.manager.blocks.live_rows(lane).tolist() for lane in books.lanes}
    books.finish(ticket)
    assert rows == {lane: books.manager.blocks.live_rows(lane).tolist() for lane in books.lanes}
    assert not books.manager.pool.pins.any()
    books.finish_all()


def test_the_lane_of_a_dropped_move_may_have_a_new_sequence_when_it_ends() -> None:
    books, lane = holey()
    books.reclaim(lane, beside=True)
    [ticket] = books.beside
    books.release([lane])
    assert books.compute(text(9), publish=False) == lane
    books.finish(ticket)  # the driver sees to it that nothing of the new sequence moved
    books.finish_all()


def test_several_moves_of_one_sequence_end_in_any_order() -> None:
    books = BooksDriver()
    lane = books.compute(text(18), publish=False)
    books.evict({lane: [1, 6]})
    first = books.relocate(lane, [8, 9], [18, 19], beside=True)
    second = books.relocate(lane, [12], [1], beside=True)
    books.finish(second.ticket)
    assert books.manager.moves.is_pending(lane)
    books.finish(first.ticket)
    assert not books.manager.moves.is_pending(lane)
    assert books.manager.tokens.row_of(lane, 12) == 1
    assert books.manager.tokens.row_of(lane, 9) == 19


def test_a_shared_source_may_be_matched_while_it_is_copied() -> None:
    books = BooksDriver()
    lane = books.compute(text(9))
    copy = books.relocate(lane, [4, 5], [9, 10], beside=True)
    other = books.compute(text(9))
    books.finish(copy.ticket)
    assert books.manager.tokens.row_of(lane, 4) == 9
    assert books.manager.tokens.row_of(other, 4) == 4


def test_the_beginning_of_a_source_is_forgotten_while_others_hold_it() -> None:
    """The source block comes to be shared and unpublished, a token that was about to move dies, the lane goes on."""
    books = BooksDriver()
    lane = books.compute(text(9))
    copy = books.relocate(lane, [4, 5], [9, 10], beside=True)
    other = books.compute(text(9))
    books.evict({other: [0, 1, 2, 3]})
    books.reclaim(other)
    books.evict({lane: [0, 4, 8]})
    books.grow({lane: 1})
    assert not books.manager.pool.published.any()
    for _ in range(6):
        books.grow({lane: 1})
    books.finish(copy.ticket)
    books.finish_all()


def test_reclaim_leaves_a_sequence_with_moves_under_way_alone() -> None:
    books, lane = holey()
    other = books.compute(text(8), publish=False)
    books.evict({other: [0, 1, 2, 4, 5, 6]})
    books.reclaim(lane, beside=True)
    found = books.manager.reclaim([lane, other], beside=True)
    assert [moved for moved, _ in found.copies] == [other]
    assert found.num_blocks == 0
    assert found.decision.blocks_returned == 1


def test_dead_blocks_come_back_while_a_copy_runs() -> None:
    books, lane = holey()
    books.relocate(lane, [0], [5], beside=True)
    books.evict({lane: [8]})
    assert books.reclaim(lane) == 1, "the third block: no copy touches it, and its last token has died"
    [ticket] = books.beside
    books.finish(ticket)
    assert len(books.blocks_of(lane)) == 2


def test_a_ticket_ends_once() -> None:
    books, lane = holey()
    books.reclaim(lane, beside=True)
    [ticket] = books.beside
    books.finish(ticket)
    with pytest.raises(KeyError):
        books.manager.finish(ticket)
