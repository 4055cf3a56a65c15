"""`plan_reclaim` against every other plan there could be."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import live_counts
from vtoken.memory.reclaim import plan_reclaim


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], int, int]:
    size = draw(st.sampled_from((4, 5, 16)))
    return draw(live_counts(size)), size, draw(st.integers(0, 2 * size))


def cheapest(live: list[int], size: int, spare: int) -> tuple[int, int]:
    """(blocks kept, tokens copied) of the best plan, by trying all: fewest blocks first, then fewest copies."""
    used = [n for n in live if n]
    best = (len(used), 0)  # leave all where they are
    for kept in (chosen for k in range(len(used) + 1) for chosen in combinations(used, k)):
        if len(kept) * size >= sum(used) + spare:
            best = min(best, (len(kept), sum(used) - sum(kept)))
    return best


@given(sequences())
def test_no_plan_keeps_fewer_blocks_or_copies_less(case: tuple[list[int], int, int]) -> None:
    live, size, spare = case
    plan = plan_reclaim(np.array(live, np.int32), size, spare)
    assert (len(plan.keep), plan.num_copies) == cheapest(live, size, spare)
    assert sorted([*plan.keep.tolist(), *plan.empty.tolist()]) == list(range(len(live)))
    assert plan.num_copies == sum(live[i] for i in plan.empty.tolist())
    assert plan.num_copies <= sum(size - live[i] for i in plan.keep.tolist()), "the copies would not fit"


@given(sequences())
def test_without_compaction_nothing_is_copied(case: tuple[list[int], int, int]) -> None:
    live, size, spare = case
    plan = plan_reclaim(np.array(live, np.int32), size, spare, compact=False)
    assert plan.num_copies == 0
    assert sorted(plan.empty.tolist()) == [i for i, n in enumerate(live) if n == 0]


@pytest.mark.parametrize(
    ("live", "spare", "reason", "kept", "copies"),
    [
        ([1, 1, 1, 1], 0, "packed", 1, 3),
        ([1, 1, 1, 1], 1, "packed", 2, 2),  # one cell is left for the next token
        ([4, 4, 4, 1], 0, "no_gain", 4, 0),
        ([4, 0, 4, 1], 0, "dead_blocks", 3, 0),
        ([2, 4, 2, 0], 0, "packed", 2, 2),
        ([], 0, "no_gain", 0, 0),
        ([0, 0], 1, "dead_blocks", 0, 0),
    ],
)
def test_reasons(live: list[int], spare: int, reason: str, kept: int, copies: int) -> None:
    plan = plan_reclaim(np.array(live, np.int32), 4, spare)
    assert (plan.reason, len(plan.keep), plan.num_copies) == (reason, kept, copies)
