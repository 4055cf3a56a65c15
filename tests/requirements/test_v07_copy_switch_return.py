"""V7: copy asynchronously -> switch the map -> return blocks. A copy is done before its map is used, earlier readers
are done before a block is reused; an early switch or an early free, injected, is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.eviction_log import phases_of, shrinking_driver
from tests.memory.driver import BooksDriver
from tests.memory.model import BooksFault
from tests.memory.mutants import planted
from vtoken.base.errors import InvariantError


@settings(max_examples=25)
@given(
    delay=st.integers(0, 6),
    policy=st.sampled_from(["h2o", "random", "knorm"]),
    budget=st.integers(12, 40),
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
)
def test_whenever_a_copy_ends_the_phases_come_in_their_order(
    delay: int, policy: str, budget: int, prompts: list[int]
) -> None:
    """The driver holds each answer to a model of plain numbers, and overwrites every block that comes back."""
    driver = shrinking_driver(policy, budget, prompts, beside_delay=delay).run()
    for events in phases_of(driver).values():
        assert events[0].phase == "plan"
        assert [event.step for event in events] == sorted(event.step for event in events)
        copied = {event.lane: event.step for event in events if event.phase == "copy"}
        ended = [event for event in events if event.lane is not None and event.phase in ("return", "drop")]
        assert len({event.lane for event in ended}) == len(ended), "a copy ends once"
        # It was in the plan of its step; what it emptied returns, and its map is read, with a later one.
        assert all(event.step > copied[event.lane] + delay for event in ended)


def beside(books: BooksDriver) -> None:
    """A sequence is packed, grows, and others want blocks while its copy runs."""
    lane = books.compute([i % 3 for i in range(16)], publish=False)
    books.evict({lane: [p for p in range(16) if p % 4]})
    books.reclaim(lane, beside=True)
    books.grow({lane: 3})
    other = books.compute([2] * 9, publish=False)
    for ticket in list(books.beside):
        books.finish(ticket)
    books.grow({lane: 4, other: 4})


def released(books: BooksDriver) -> None:
    """A sequence ends while its copy runs, and another one wants all blocks."""
    lane = books.compute([i % 3 for i in range(9)], publish=False)
    books.relocate(lane, [0, 1], [9, 10], beside=True)
    books.release([lane])
    books.compute([1] * 4 * books.manager.num_available, publish=False)
    books.finish_all()


EARLY: dict[str, Callable[[BooksDriver], None]] = {
    "map_switched_before_the_copy_ended": beside,
    "source_freed_before_the_copy_ended": beside,
    "block_handed_out_while_pinned": released,
}
WATCHMEN = [{"check_books": False}, {"check_shadow": False}]


@pytest.mark.parametrize("name", EARLY)
@pytest.mark.parametrize("watchmen", WATCHMEN, ids=["the shadow store", "the books themselves"])
def test_an_early_switch_and_an_early_free_are_caught(name: str, watchmen: dict[str, bool]) -> None:
    EARLY[name](BooksDriver(num_blocks=10, **watchmen))
    with planted(name), pytest.raises((BooksFault, InvariantError)):
        EARLY[name](BooksDriver(num_blocks=10, **watchmen))


@pytest.mark.parametrize("name", ["map_switched_before_the_copy_ended", "source_freed_before_the_copy_ended"])
def test_it_shows_in_the_answers_too(name: str) -> None:
    """Books and cells are not looked at: a token was read where the copy had not been yet, or somebody else had."""

    def answers() -> None:
        shrinking_driver("h2o", 20, [60, 50, 40, 33, 21], beside_delay=5, checks=False).run()

    answers()
    with planted(name), pytest.raises((AssertionError, InvariantError)):
        answers()
