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


def pack_two_sequences(books: BooksDriver) -> None:
    lanes = [books.compute(text(8), publish=False), books.compute(text(8), publish=False)]
    books.evict({lanes[0]: [2, 3, 5, 6], lanes[1]: [1, 2, 5, 6, 7]})  # 2 + 2 tokens live, and 2 + 1
    books.reclaim(lanes, wanted=1)


def pack_all_but_what_is_needed_next(books: BooksDriver) -> None:
    lane = books.compute(text(8), publish=False)
    books.evict({lane: [1, 2, 5, 6]})
    books.reclaim(lane, spare_cells=1)
    books.grow({lane: 1})


def pack_beside_a_fork(books: BooksDriver) -> None:
    lane = books.compute(text(8), publish=False)
    books.fork(lane)
    books.evict({lane: [0, 1, 2, 5, 6, 7]})
    books.reclaim(lane)


def pack_while_a_dropped_copy_runs(books: BooksDriver) -> None:
    lane = books.compute(text(9), publish=False)
    copy = books.relocate(lane, [0], [9], beside=True)
    books.release([books.fork(lane)])  # the move is dropped, its copy runs on
    books.evict({lane: [1, 2, 3, 5, 6, 7]})
    books.reclaim(lane)
    books.finish(copy.ticket)


def pack_while_moving(books: BooksDriver) -> None:
    lane = books.compute(text(16), publish=False)
    books.evict({lane: [1, 5, 6, 7, 9, 10, 11]})
    copy = books.relocate(lane, [2], [1], beside=True)  # within the first block; two others could be packed
    books.reclaim(lane)
    books.finish(copy.ticket)


def two_sequences_die_back(books: BooksDriver) -> None:
    lanes = [books.compute(text(8), publish=False), books.compute(text(8), publish=False)]
    books.evict({lane: [4, 5, 6, 7] for lane in lanes})
    books.reclaim(lanes, wanted=1)  # both come back: they cost nothing


def reclaim_in_the_middle_of_a_prompt(books: BooksDriver) -> None:
    lane = books.admit(text(12))
    books.grow({lane: 3})
    books.reclaim(lane)


def twin_lets_go_of_what_is_shared(books: BooksDriver) -> None:
    twin = books.fork(books.compute(text(8), publish=False))
    books.evict({twin: [0, 1, 2, 3]})
    books.reclaim(twin)


def decode_without_reuse(books: BooksDriver) -> None:
    lane = books.compute(text(6), publish=False)
    books.evict({lane: [1]})
    books.grow({lane: 1})


def repack_without_reuse(books: BooksDriver) -> None:
    lane = books.compute(text(12), publish=False)
    books.evict({lane: [0, 1, 2, 4, 5, 6, 8, 9, 10]})
    books.reclaim(lane)
    books.grow({lane: 1})


BOTH = ("books", "shadow")
WITHOUT_REUSE = (decode_without_reuse, repack_without_reuse)
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
    "survivor_left_in_a_returned_block": (measure_and_pack, BOTH),
    "spare_cells_ignored": (pack_all_but_what_is_needed_next, ("shadow",)),
    "more_blocks_packed_than_wanted": (pack_two_sequences, ("shadow",)),
    "first_sequences_instead_of_cheapest_blocks": (pack_two_sequences, ("shadow",)),
    "shared_blocks_packed": (pack_beside_a_fork, BOTH),
    "blocks_packed_while_a_copy_touches_them": (pack_while_a_dropped_copy_runs, ("shadow",)),
    "sequence_packed_while_it_moves": (pack_while_moving, ("shadow",)),
    "dead_blocks_of_the_first_sequence_alone": (two_sequences_die_back, ("shadow",)),
    "blocks_for_tokens_to_come_taken_for_dead": (reclaim_in_the_middle_of_a_prompt, ("shadow",)),
    "blocks_counted_that_others_still_hold": (twin_lets_go_of_what_is_shared, ("shadow",)),
    "holes_filled_in_the_naive_arm": (decode_without_reuse, ("shadow",)),
    "cells_behind_the_last_token_lost_after_repacking": (repack_without_reuse, ("shadow",)),
}


def play(scenario: Scenario, watchman: str) -> None:
    books = BooksDriver(
        block_size=4,
        num_blocks=5,
        reuse_cells=scenario not in WITHOUT_REUSE,
        check_books=watchman == "books",
        check_shadow=watchman == "shadow",
    )
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
        max_examples=4000,  # most are found in some tens; what only a price tells apart takes the longest
        stateful_step_count=50,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with planted(name), pytest.raises((InvariantError, BooksFault)):
        run_state_machine_as_test(BooksMachine, settings=quick)
