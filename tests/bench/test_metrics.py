"""Figures of cases small enough to be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.bench.metrics import Totals, reduction, scattered_ceiling, summarize, throughput, victim_hash
from vtoken.bench.recorder import SAMPLE, STEP, Recording

TOTALS = Totals(
    tokens_generated=6,
    tokens_computed=20,
    tokens_erased=5,
    blocks_returned=3,
    blocks_returned_dead=1,
    tokens_copied=2,
    reclaim_plans=4,
    preemptions=1,
    rungs={"reclaim": 2},
    verdicts={"packed": 1},
    victims="abc",
)


def step(time: float, **values: float) -> np.ndarray:
    one = np.zeros(1, STEP)
    one["time"] = time
    for name, value in values.items():
        one[name] = value
    return one


def sample(request: int, length: int, held: int, live: int, *, short: bool = True, drained: bool = True) -> tuple:
    return request, length, held, 1, live, short, drained


def recording(samples: list[tuple], steps: list[np.ndarray] | None = None, block_size: int = 4) -> Recording:
    return Recording(
        block_size=block_size,
        num_blocks=10,
        steps=np.concatenate(steps) if steps else np.empty(0, STEP),
        samples=np.array(samples, SAMPLE),
        token_gaps=np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
        first_token_seconds=np.array([10.0]),
        occupancy=np.zeros(block_size + 1, np.int64),
        peak_occupancy=np.zeros(block_size + 1, np.int64),
        peak_running=3,
        unpreempted_running=2,
        slot_map=None,
    )


def test_a_runs_figures() -> None:
    steps = [
        step(1.0, forward=0.9, copies=0.1, held=4, partly=1, holes=4, tail=2, running=2, planning=0.01),
        step(3.0, taken=2.5, forward=2.0, is_decode=True, held=8, partly=4, holes=4, tail=0, running=4, planning=0.03),
    ]
    # Floors are 1, 2 and 2 blocks of 4.
    samples = [sample(0, 9, 2, 4), sample(0, 10, 2, 5), sample(1, 9, 4, 8, drained=False)]
    steps[0]["drawn"], steps[1]["drawn"] = 2, 4
    found = summarize(recording(samples, steps), TOTALS, bytes_per_token=100)
    assert (found.steps, found.seconds, found.throughput) == (2, 3.0, 2.0)
    assert (found.token_gap_p50, found.token_gap_p95) == (3.0, pytest.approx(4.8))
    assert (found.decode_p50, found.decode_p95) == (2.5, 2.5), "steps in which every sequence decodes"
    assert found.first_token_p50 == 10.0
    assert (found.drained_samples, found.unused_blocks) == (2, 1.0)
    assert found.partly_used_share == pytest.approx((1 / 4 + 4 / 8) / 2)
    assert found.retained_blocks == pytest.approx(8 / 3)
    assert found.floor_blocks == pytest.approx(5 / 3)
    assert found.retained_over_floor == pytest.approx(8 / 5 - 1)
    assert (found.peak_held_blocks, found.mean_running, found.peak_running) == (8, 3.0, 3)
    assert found.holes_share == pytest.approx((4 / 16 + 4 / 32) / 2)
    assert found.tail_share == pytest.approx(2 / 16 / 2)
    assert (found.tokens_copied, found.bytes_copied) == (2, 200)
    assert (found.copy_wait_seconds, found.copy_wait_share) == (pytest.approx(0.1), pytest.approx(0.1 / 3))
    assert (found.planner_seconds, found.planner_p50) == (pytest.approx(0.04), pytest.approx(0.02))
    assert (found.blocks_returned, found.blocks_returned_dead, found.preemptions) == (3, 1, 1)
    assert found.victims == "abc"


def test_too_many_blocks_count_only_where_reclaim_had_given_all_it_could() -> None:
    def over(*samples: tuple) -> tuple[int, float, int]:
        found = summarize(recording(list(samples)), TOTALS, 1)
        return found.blocks_over_floor, found.beyond_floor_share, found.drained_samples

    assert over(sample(0, 9, 2, 4)) == (1, 0.0, 1), "one block too many is allowed"
    assert over(sample(0, 9, 3, 4)) == (2, 1.0, 1)
    assert over(sample(0, 9, 3, 4, drained=False)) == (0, 0.0, 0)
    # A floor of 100 allows 2 % more.
    assert over(sample(0, 900, 102, 400), sample(0, 901, 103, 400)) == (3, 0.5, 2)


def test_throughput_leaves_the_warm_up_out() -> None:
    steps = [step(time, drawn=drawn) for time, drawn in ((4.0, 1), (5.0, 1), (6.0, 3), (8.0, 3))]
    some = recording([], steps)
    assert throughput(some, 0.0) == 8 / 8
    # A quarter of the eight tokens has been drawn at 5 s: six more in three seconds.
    assert throughput(some, 0.25) == 6 / 3
    assert throughput(some, 0.3) == 6 / 3, "a step is left out as a whole, or not"
    assert throughput(recording([]), 0.25) == 0


def test_a_run_of_nothing_has_no_figures_and_divides_by_nothing() -> None:
    empty = replace(recording([]), token_gaps=np.empty(0), first_token_seconds=np.empty(0))
    found = summarize(empty, TOTALS, 1)
    assert (found.throughput, found.decode_p95, found.retained_blocks, found.retained_over_floor) == (0, 0, 0, 0)


def test_arms_are_compared_at_common_places_at_which_both_were_short() -> None:
    ours = recording([sample(0, 9, 1, 4), sample(0, 10, 2, 5), sample(1, 9, 9, 4, short=False)])
    naive = recording([sample(0, 10, 3, 5), sample(0, 11, 8, 6), sample(0, 9, 3, 4), sample(1, 9, 9, 4)])
    found = reduction(ours, naive)
    assert (found.places, found.retained, found.other_retained, found.floor) == (2, 1.5, 3.0, 1.5)
    assert (found.share, found.possible) == (0.5, 0.5)


def test_arms_that_were_never_short_are_compared_at_all_common_places() -> None:
    ours, naive = (recording([sample(0, 9, held, 4, short=False)]) for held in (1, 4))
    found = reduction(ours, naive)
    assert (found.places, found.share) == (1, 0.75)
    nothing = reduction(recording([]), naive)
    assert (nothing.places, nothing.share, nothing.ceiling) == (0, 0.0, 0.0)


def test_the_ceiling_of_scattered_survivors() -> None:
    # Half of a text survives: a block of 2 keeps one with probability 3/4, and half the blocks would do.
    assert scattered_ceiling(np.array([50]), np.array([100]), 2) == pytest.approx(1 / 3)
    # The published range: 30 % erased and 72.3 % saved in blocks of 16.
    assert scattered_ceiling(np.array([70]), np.array([100]), 16) == pytest.approx(0.3)
    assert scattered_ceiling(np.array([25]), np.array([100]), 16) == pytest.approx(0.7475, abs=1e-4)
    assert scattered_ceiling(np.array([100]), np.array([100]), 16) == 0


@given(share=st.floats(0.05, 1), block_size=st.sampled_from([4, 16, 48]), seed=st.integers(0, 1000))
def test_the_ceiling_is_what_chance_leaves(share: float, block_size: int, seed: int) -> None:
    """Against a text drawn at random, with blocks counted in fractions."""
    length = block_size * 2000
    alive = np.random.default_rng(seed).random(length) < share
    kept = alive.reshape(-1, block_size).any(axis=1).sum()
    if not kept:
        return
    found = scattered_ceiling(np.array([alive.sum()]), np.array([length]), block_size)
    assert 1 - alive.sum() / block_size / kept == pytest.approx(found, abs=0.03)


def test_the_hash_of_victims_tells_who_died_where_and_when() -> None:
    same = victim_hash({0: {3: 10, 4: 12}, 1: {}})
    assert victim_hash({1: {}, 0: {4: 12, 3: 10}}) == same, "in whatever order they are listed"
    others = [{0: {3: 10, 4: 13}, 1: {}}, {0: {3: 10}, 1: {4: 12}}, {0: {3: 10, 5: 12}, 1: {}}, {0: {3: 10, 4: 12}}]
    assert len({same, *map(victim_hash, others)}) == 5
