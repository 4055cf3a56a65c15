"""Each planted bug is caught, and the same scenario passes without it.

Two watchmen look after the books: their own `check()`, and the shadow store with its model. Each mutant is tried with
either of them alone, so that neither hides behind the other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.memory.driver import BooksDriver
from tests.memory.model import BooksFault
from tests.memory.mutants import MUTANTS, planted
from tests.memory.test_state_machine import BooksMachine
from vtoken.base.errors import InvariantError

Scenario = Callable[[BooksDriver], None]


def text(num_tokens: int) -> list[int]:
    return [i % 3 for i in range(num_tokens)]


def move_beside_a_step(books: BooksDriver) -> None:
    lane = books.compute(text(9), publish=False)
    copy = books.relocate(lane, [0, 1], [9, 10], beside=True)
    books.grow({lane: 1})
    books.finish(copy.ticket)


def lane_ends_while_its_copy_runs(books: BooksDriver) -> None:
    lane = books.compute(text(9), publish=False)
    copy = books.relocate(lane, [0, 1], [9, 10], beside=True)
    books.release([lane])
    books.compute(text(12), publish=False)  # wants three blocks, and three are free besides the two that are pinned
    books.finish(copy.ticket)


def fork_and_diverge(books: BooksDriver) -> None:
    lane = books.compute(text(6), publish=False)
    twin = books.fork(lane)
    books.grow({lane: 1, twin: 1})
    books.grow({lane: 1, twin: 1})


def measure_and_pack(books: BooksDriver) -> None:
    lane = books.compute(text(9), publish=False)
    books.measure(lane, 10)
    books.evict({lane: [0, 1, 2, 4, 5, 6]})
    books.reclaim(lane)


def write_into_a_published_block(books: BooksDriver) -> None:
    lane = books.compute(text(8))
    books.evict({lane: [1]})
    books.grow({lane: 1})


def release_one_of_two(books: BooksDriver) -> None:
    lane = books.compute(text(6), publish=False)
    books.fork(lane)
    books.release([lane])


def come_and_go(books: BooksDriver) -> None:
    books.release([books.compute(text(4), publish=False)])
    books.admit(text(4))
    books.admit(text(5))


def step_fails(books: BooksDriver) -> None:
    lane = books.admit(text(9))
    books.extend({lane: 9}, publish=True)
    books.run_step(fails=True)
    books.compute(text(9))


def branch_loses_a_shared_token(books: BooksDriver) -> None:
    twin = books.fork(books.compute(text(8)))
    books.evict({twin: [1]})
    books.grow({twin: 4}, publish=True)


def token_dies_while_it_is_copied(books: BooksDriver) -> None:
    lane = books.compute(text(9), publish=False)
    copy = books.relocate(lane, [0, 1], [9, 10], beside=True)
    books.evict({lane: [0]})
    books.finish(copy.ticket)


def lane_grows_while_its_copy_runs(books: BooksDriver) -> None:
    lane = books.compute(text(9), publish=False)
    copy = books.relocate(lane, [0, 1], [9, 10], beside=True)
    books.grow({lane: 2})
    books.finish(copy.ticket)


def fork_while_a_copy_runs(books: BooksDriver) -> None:
    lane = books.compute(text(9), publish=False)
    copy = books.relocate(lane, [0, 1], [9, 10], beside=True)
    books.fork(lane)
    books.grow({lane: 1})
    books.finish(copy.ticket)


def beginning_is_overwritten(books: BooksDriver) -> None:
    lane = books.compute(text(12))
    books.evict({lane: [0]})
    books.grow({lane: 1})


def fork_after_measuring(books: BooksDriver) -> None:
    lane = books.compute(text(6), publish=False)
    books.measure(lane, 10)
    books.fork(lane)


def same_prompt_again(books: BooksDriver) -> None:
    books.compute(text(8))
    books.admit(text(8))


BOTH = ("books", "shadow")
# Mutant -> (scenario, the watchmen that notice). What a cell contains, only the shadow store knows.
CASES: dict[str, tuple[Scenario, tuple[str, ...]]] = {
    "map_switched_before_the_copy_ended": (move_beside_a_step, BOTH),
    "block_handed_out_while_pinned": (lane_ends_while_its_copy_runs, BOTH),
    "source_freed_before_the_copy_ended": (move_beside_a_step, BOTH),
    "no_copy_on_write": (fork_and_diverge, ("shadow",)),
    "copy_on_write_orders_no_copy": (fork_and_diverge, ("shadow",)),
    "columns_left_behind": (measure_and_pack, ("shadow",)),
    "published_block_written": (write_into_a_published_block, ("shadow",)),
    "double_release": (release_one_of_two, BOTH),
    "lane_released_twice": (come_and_go, BOTH),
    "pending_entry_left_after_a_failed_step": (step_fails, ("shadow",)),
    "publish_after_eviction": (branch_loses_a_shared_token, ("shadow",)),
    "dead_tokens_moved_too": (token_dies_while_it_is_copied, BOTH),
    "claimed_cells_left_open": (lane_grows_while_its_copy_runs, BOTH),
    "moves_survive_a_fork": (fork_while_a_copy_runs, BOTH),
    "children_stay_when_a_block_is_forgotten": (beginning_is_overwritten, ("books",)),
    "twin_starts_with_empty_statistics": (fork_after_measuring, ("shadow",)),
    "whole_prompt_matched": (same_prompt_again, ("shadow",)),
}


def play(scenario: Scenario, watchman: str) -> None:
    books = BooksDriver(block_size=4, num_blocks=5, check_books=watchman == "books", check_shadow=watchman == "shadow")
    scenario(books)
    books.finish_all()


def test_every_mutant_has_its_case() -> None:
    assert set(CASES) == set(MUTANTS)


@pytest.mark.parametrize(
    "scenario", dict.fromkeys(scenario for scenario, _ in CASES.values()), ids=lambda s: s.__name__
)
@pytest.mark.parametrize("watchman", BOTH)
def test_scenario_passes_without_a_bug(scenario: Scenario, watchman: str) -> None:
    play(scenario, watchman)


@pytest.mark.parametrize(("name", "watchman"), [(name, w) for name, (_, watchmen) in CASES.items() for w in watchmen])
def test_mutant_is_caught(name: str, watchman: str) -> None:
    with planted(name), pytest.raises(InvariantError if watchman == "books" else BooksFault):
        play(CASES[name][0], watchman)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_state_machine_finds_the_mutant(name: str) -> None:
    quick = settings(
        max_examples=1000,
        stateful_step_count=50,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with planted(name), pytest.raises((InvariantError, BooksFault)):
        run_state_machine_as_test(BooksMachine, settings=quick)
