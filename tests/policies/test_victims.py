"""`protection`, `checked_scores` and `choose_victims`, held against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.policies.views import Lane, view_of
from vtoken.base.errors import EngineError, VtokenError
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.registry import BUILT_IN, policy_class
from vtoken.policies.statistics import AttentionStatistic, LagDeviation, Sum
from vtoken.policies.victims import PolicyError, checked_scores, choose_victims, protection


@dataclass(frozen=True, kw_only=True)
class Given(Policy):
    """Scores that a test hands in as a statistic."""

    name = "given"
    source = "tests"

    @property
    def needs(self) -> tuple[Sum, ...]:
        return (Sum(),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return view[Sum()]


@dataclass(frozen=True, kw_only=True)
class GivenBlocks(Given):
    name = "given_blocks"
    whole_blocks = True


def scored(*scores: float, blocks: list[int] | None = None, **rest: Any) -> Lane:
    return Lane(range(len(scores)), {Sum(): scores}, blocks=blocks, **rest)


def dead(policy: Policy, lane: Lane, count: int, protected: tuple[int, ...] = ()) -> list[int]:
    """Positions that die of one lane."""
    view = view_of(lane, padding=2)
    mask = np.isin(view.positions, protected)
    return view.positions[choose_victims(policy, view, mask, np.array([count]))].tolist()


# --- protection -------------------------------------------------------------------------------------------------------


def test_sinks_recent_tokens_and_pins_are_protected() -> None:
    view = view_of(Lane(range(10)), Lane([0, 2, 4, 6, 8, 9], length=11))
    mask = protection(Given(sinks=2, recent=3), view, [[(4, 6)], [(4, 5), (6, 7)]])
    assert view.positions[0][mask[0]].tolist() == [0, 1, 4, 5, 7, 8, 9]
    # Position 1 is dead and 10 too: a token that died before does not put an older one in its place.
    assert view.positions[1][mask[1] & view.is_live[1]].tolist() == [0, 4, 6, 8, 9]


def test_a_share_of_the_budget_is_protected() -> None:
    view = view_of(Lane(range(10), budget=5), Lane(range(10), budget=8))
    mask = protection(Given(recent=0.5), view)
    assert mask.sum(axis=1).tolist() == [2, 4]
    assert mask[:, -2:].all()


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_the_lowest_die_and_of_equal_ones_the_older() -> None:
    assert dead(Given(), scored(3, 1, 2, 1, 1), 1) == [1]
    assert dead(Given(), scored(3, 1, 2, 1, 1), 2) == [1, 3]
    assert dead(Given(), scored(3, 1, 2, 1, 1), 4) == [1, 2, 3, 4]


def test_no_more_die_than_may() -> None:
    assert dead(Given(), scored(1, 2, 3), 7, protected=(1,)) == [0, 2]
    assert dead(Given(), scored(1, 2, 3), 0) == []
    assert dead(Given(), scored(1, 2, 3), 2, protected=(0, 1, 2)) == []
    assert dead(Given(), Lane([], {Sum(): []}), 3) == []


def test_infinite_scores_die_last_but_die() -> None:
    assert dead(Given(), scored(np.inf, 5, np.inf, -np.inf), 3) == [0, 1, 3]


def test_a_token_that_was_not_read_yet_does_not_die() -> None:
    # Its score is NaN; whoever asks protects it.
    assert dead(Given(), scored(5, np.nan, 3), 3, protected=(1,)) == [0, 2]


Scores = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, np.inf]), max_size=12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenView, NDArray[np.bool_], NDArray[np.int64]]:
    lanes = []
    for scores in draw(st.lists(Scores, min_size=1, max_size=4)):
        size = len(scores)
        positions = sorted(draw(st.sets(st.integers(0, 40), min_size=size, max_size=size)))
        blocks = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
        lanes.append(Lane(positions, {Sum(): scores}, blocks=blocks or None))
    view = view_of(*lanes, padding=draw(st.integers(0, 3)))
    protected = np.array(draw(st.lists(st.booleans(), min_size=view.positions.size, max_size=view.positions.size)))
    counts = draw(st.lists(st.integers(0, 14), min_size=len(lanes), max_size=len(lanes)))
    return view, protected.astype(np.bool_).reshape(view.positions.shape), np.array(counts, np.int64)


@given(cases())
def test_tokens_die_as_in_a_plain_loop(case: tuple[TokenView, NDArray[np.bool_], NDArray[np.int64]]) -> None:
    view, protected, counts = case
    expected = np.zeros(view.positions.shape, np.bool_)
    for lane, count in enumerate(counts):
        scores = view[Sum()][lane]
        candidates = [i for i in range(view.num_live[lane]) if not protected[lane, i]]
        for i in sorted(candidates, key=lambda i: (scores[i], i))[:count]:
            expected[lane, i] = True
    assert (choose_victims(Given(), view, protected, counts) == expected).all()


# --- whole blocks -----------------------------------------------------------------------------------------------------


def test_a_block_dies_by_the_mean_of_its_live_tokens() -> None:
    lane = scored(9, 9, 1, 2, 1, 5, 5, 5, blocks=[0, 0, 1, 1, 1, 2, 2, 3])
    assert dead(GivenBlocks(), lane, 1) == [2, 3, 4]
    assert dead(GivenBlocks(), lane, 3) == [2, 3, 4]
    assert dead(GivenBlocks(), lane, 4) == [2, 3, 4, 5, 6]
    assert dead(GivenBlocks(), lane, 99) == [0, 1, 2, 3, 4, 5, 6]  # the newest block is still being filled


def test_a_block_with_a_protected_token_stays_whole() -> None:
    lane = scored(1, 1, 2, 2, 3, 3, blocks=[0, 0, 1, 1, 2, 2])
    assert dead(GivenBlocks(), lane, 2, protected=(1,)) == [2, 3]
    assert dead(GivenBlocks(), lane, 9, protected=(0, 3)) == []


def test_tokens_of_a_block_may_lie_apart_in_the_text() -> None:
    lane = scored(4, 1, 4, 1, 9, blocks=[7, 2, 7, 2, 5])
    assert dead(GivenBlocks(), lane, 1) == [1, 3]


def test_of_equal_blocks_that_with_the_oldest_token_dies() -> None:
    assert dead(GivenBlocks(), scored(2, 2, 2, 2, 9, blocks=[3, 1, 1, 3, 0]), 1) == [0, 3]


@given(cases())
def test_blocks_die_as_in_a_plain_loop(case: tuple[TokenView, NDArray[np.bool_], NDArray[np.int64]]) -> None:
    view, protected, counts = case
    expected = np.zeros(view.positions.shape, np.bool_)
    for lane, count in enumerate(counts):
        num_live = int(view.num_live[lane])
        blocks: dict[int, list[int]] = {}
        for i in range(num_live):
            blocks.setdefault(int(view.blocks[lane, i]), []).append(i)
        for block in {int(view.blocks[lane, i]) for i in range(num_live) if protected[lane, i] or i == num_live - 1}:
            del blocks[block]
        scores = view[Sum()][lane]
        for tokens in sorted(blocks.values(), key=lambda tokens: (sum(scores[tokens]) / len(tokens), tokens[0])):
            if expected[lane].sum() < count:
                expected[lane, tokens] = True
    assert (choose_victims(GivenBlocks(), view, protected, counts) == expected).all()


# --- scores -----------------------------------------------------------------------------------------------------------


def answering(answer: Callable[[TokenView], Any]) -> Policy:
    @dataclass(frozen=True)
    class Answering(Policy):
        name = "answering"
        source = "tests"

        def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
            return answer(view)

    return Answering()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda view: [1.0, 2.0], "returned a list where an array of numbers was expected"),
        (lambda view: view.positions.astype(str), "returned an array of <U11 where an array of numbers"),
        (lambda view: view.positions[0].astype(float), r"returned shape \[4\] for \[1, 4\] lanes and tokens"),
        (
            lambda view: np.where(view.positions == 1, np.nan, 1.0),
            "returned NaN for 1 live tokens, the first at position 1",
        ),
        (
            lambda view: np.ma.masked_invalid(np.where(view.positions == 1, np.nan, 1.0)),
            "returned a MaskedArray where an array of numbers was expected",
        ),
        (lambda view: np.ma.zeros(view.positions.shape), "returned a MaskedArray where an array of numbers"),
        (lambda view: 1 / 0, "failed with ZeroDivisionError: division by zero"),
        (
            lambda view: np.add(view.positions, 1, out=view.positions),
            "failed with ValueError: output array is read-only",
        ),
    ],
)
def test_an_answer_that_is_no_score_is_refused_in_words(answer: Callable[[TokenView], Any], said: str) -> None:
    view = view_of(Lane(range(4)))
    with pytest.raises(PolicyError, match=f"kv_policy 'answering': score.. {said}") as raised:
        checked_scores(answering(answer), view)
    assert isinstance(raised.value, EngineError)
    assert isinstance(raised.value, VtokenError)


def test_whole_numbers_are_scores_and_padding_may_be_nan() -> None:
    view = view_of(Lane([3, 4]), Lane([5]))
    assert checked_scores(answering(lambda view: view.positions), view)[0].tolist() == [3.0, 4.0]
    filled = checked_scores(answering(lambda view: np.where(view.is_live, 1.0, np.nan)), view)
    assert filled[0].tolist() == [1.0, 1.0]


@st.composite
def lanes_for(draw: st.DrawFn, policy: Policy) -> list[Lane]:
    lanes = []
    for _ in range(draw(st.integers(2, 4))):
        source = np.random.default_rng(draw(st.integers(0, 10**6)))
        size = draw(st.integers(1, 300))
        statistics = {need: source.random(size) for need in policy.needs}
        for need in policy.needs:
            if isinstance(need, LagDeviation):
                statistics[need][: need.sinks] = np.inf
                statistics[need][need.sinks + max(0, ((size - need.sinks) // need.lag - 1) * need.lag) :] = np.inf
        positions = sorted(source.choice(600, size, replace=False).tolist())
        lanes.append(Lane(positions, statistics, budget=50))
    return lanes


@pytest.mark.parametrize("name", BUILT_IN)
@given(data=st.data())
def test_neighbours_do_not_change_a_bit_of_a_score(name: str, data: st.DataObject) -> None:
    policy = policy_class(name)()
    lanes = data.draw(lanes_for(policy))
    together = checked_scores(policy, view_of(*lanes, padding=data.draw(st.integers(0, 40))))
    for lane, row in zip(lanes, together, strict=True):
        alone = checked_scores(policy, view_of(lane))[0]
        assert row[: len(alone)].tobytes() == alone.tobytes()


@pytest.mark.parametrize("name", BUILT_IN)
def test_tokens_that_were_not_read_yet_leave_the_others_their_scores(name: str) -> None:
    policy = policy_class(name)()
    source, size, unread = np.random.default_rng(0), 400, 20
    statistics = {need: source.random(size) for need in policy.needs}
    for need, values in statistics.items():
        if not isinstance(need, AttentionStatistic):
            values[-unread:] = np.nan
    view = view_of(Lane(range(size), statistics))
    read = view.is_live & (view.positions < size - unread)
    assert np.isfinite(checked_scores(policy, view, read)[read]).all()
