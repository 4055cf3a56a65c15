"""What every policy promises: budgets, windows, protected tokens, and statistics that are checked."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.views import Lane, view_of
from vtoken.base.errors import ConfigError
from vtoken.base.validation import shorten
from vtoken.policies.arithmetic import pool_max, pool_mean, rank_in_runs, softmax, total
from vtoken.policies.base import Policy
from vtoken.policies.expected_attention import ExpectedAttention
from vtoken.policies.h2o import H2O
from vtoken.policies.lagkv import LagKV
from vtoken.policies.registry import BUILT_IN, policy_class, resolve_policy
from vtoken.policies.rkv import RKV
from vtoken.policies.scissorhands import Scissorhands
from vtoken.policies.snapkv import SnapKV
from vtoken.policies.statistics import (
    STATISTICS,
    CountLow,
    FutureAttention,
    KeyNorm,
    KeyRedundancy,
    LagDeviation,
    Statistic,
    Sum,
    SumLast,
)
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.policies.tova import TOVA


def test_a_budget_without_room_beside_the_protected_is_refused_with_the_least_that_fits() -> None:
    StreamingLLM(recent=3).check_budget(8)
    with pytest.raises(
        ConfigError, match="kv_budget=7 is too small for streaming_llm: it protects 4 first and 3 recent"
    ):
        StreamingLLM(recent=3).check_budget(7)
    with pytest.raises(ConfigError, match="needs at least 33"):
        SnapKV().check_budget(32)  # its window is protected
    SnapKV().check_budget(33)


@given(sinks=st.integers(0, 40), recent=st.floats(0, 0.99) | st.integers(0, 40), budget=st.integers(1, 90))
def test_the_least_budget_named_is_one_that_is_taken(sinks: int, recent: int | float, budget: int) -> None:
    policy = H2O(sinks=sinks, recent=recent)
    try:
        policy.check_budget(budget)
    except ConfigError as error:
        (least,) = re.findall(r"needs at least (\d+)", str(error))
        assert int(least) > budget
        policy.check_budget(int(least))
    else:
        assert budget - sinks - policy.num_recent(budget) >= 1


def test_recent_tokens_are_a_number_or_a_share_of_the_budget() -> None:
    assert H2O().num_recent(9) == 4
    assert H2O(recent=7).num_recent(9) == 7
    assert SnapKV(recent=5, window=8).num_recent(100) == 8
    assert SnapKV(recent=12, window=8).num_recent(100) == 12


def test_the_window_is_the_longest_of_what_is_needed() -> None:
    windows = {"h2o": 0, "random": 0, "lagkv": 0, "tova": 1, "rkv": 8, "snapkv": 32, "expected_attention": 128}
    assert {name: policy_class(name)().window for name in windows} == windows
    assert Scissorhands(window=30).window == 30


def test_parameters_reach_the_statistics() -> None:
    assert SnapKV(window=7).needs == (SumLast(7),)
    assert Scissorhands(window=7).needs == (CountLow(7),)
    assert RKV(window=7, threshold=0.2).needs == (SumLast(7), KeyRedundancy(0.2))
    assert LagKV(lag=7, sinks=2).needs == (LagDeviation(7, 2),)
    assert ExpectedAttention(window=7, horizon=9).needs == (FutureAttention(9, 7),)


def test_policies_are_equal_when_their_parameters_are() -> None:
    assert SnapKV(window=7) == SnapKV(window=7)
    assert SnapKV(window=7) != SnapKV()
    assert len({TOVA(), TOVA(), H2O()}) == 2


@dataclass(frozen=True, kw_only=True)
class Tabled(Policy):
    """With a field that nothing checks."""

    name = "tabled"
    source = "tests"

    table: Any = ()

    def score(self, view: Any) -> Any:
        return view.positions


class Strange:
    def __eq__(self, other: object) -> bool:
        raise OSError("gone")

    __hash__ = None  # type: ignore[assignment]


class Vague:
    """Compares like an array, and cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __eq__(self, other: object) -> Any:
        return [True]

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (np.zeros(3), "that of a ndarray gives a ndarray, no bool"),
        (np.zeros(1), "that of a ndarray gives a ndarray, no bool"),
        ((np.zeros(3), 1), "that of a tuple raises ValueError: The truth value"),
        ({"a": [np.zeros(3)]}, "that of a dict raises ValueError: The truth value"),
        (Strange(), "that of a Strange raises OSError: gone"),
        ([Strange()], "that of a list raises OSError: gone"),
        (Vague(), "that of a Vague gives a list, no bool"),
    ],
)
def test_a_field_that_cannot_be_compared_is_named(table: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"tabled: table: expected what == tells apart, .*{said}"):
        Tabled(table=table)


@pytest.mark.parametrize("table", [(1.0, 2.0), [1, 2], {"a": (1, [2])}, print, object(), threading.Lock(), np.int64(3)])
def test_a_field_that_can_be_compared_is_taken(table: Any) -> None:
    assert (Tabled(table=table) == Tabled(table=table)) is True


@pytest.mark.parametrize(
    ("equal", "said"),
    [
        (lambda self, other: np.array([True, False]), "tabled: its == gives a ndarray, no bool"),
        (lambda self, other: self.table == other.table, "tabled: its == raises AttributeError"),
    ],
)
def test_a_policy_that_cannot_be_compared_is_refused(equal: Callable[..., Any], said: str) -> None:
    own = dataclass(frozen=True, kw_only=True)(type("Own", (Tabled,), {"__eq__": equal}))
    with pytest.raises(ConfigError, match=said):
        own()


def test_an_own_comparison_may_look_into_arrays() -> None:
    def equal(self: Tabled, other: object) -> bool:
        return isinstance(other, Tabled) and np.array_equal(self.table, other.table)

    own = dataclass(frozen=True, kw_only=True)(type("Own", (Tabled,), {"__eq__": equal}))
    assert own(table=np.zeros(2)) == own(table=np.zeros(2)) != own(table=np.ones(2))


def test_a_comparison_that_leaves_out_fields_is_refused() -> None:
    @dataclass(frozen=True, eq=False)
    class Alike(Policy):
        name = "alike"
        source = "tests"
        slack: int = 1

        def score(self, view: Any) -> Any:
            return view.positions

    with pytest.raises(ConfigError, match="alike: its == does not look at slack; leave out eq=False"):
        Alike()


def test_a_policy_that_leaves_out_its_check_is_checked_when_it_is_named() -> None:
    class Unchecked(Tabled):
        def __post_init__(self) -> None: ...

    own = dataclass(frozen=True, kw_only=True)(Unchecked)
    with pytest.raises(ConfigError, match="tabled: table: expected what == tells apart"):
        resolve_policy(own(table=np.zeros(3)))
    with pytest.raises(ConfigError, match="tabled: sinks: expected a whole number"):
        resolve_policy(own(sinks=-1))


def test_a_field_of_words_is_checked_whatever_its_value() -> None:
    @dataclass(frozen=True)
    class Worded(Tabled):
        kind: Literal["a", "b"] = "a"

    with pytest.raises(ConfigError, match=r"tabled: kind: expected 'a' or 'b', got array"):
        Worded(kind=np.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_policy_says_where_it_comes_from_and_that_it_is_a_uniform_variant(name: str) -> None:
    policy = policy_class(name)()
    assert policy.name == name
    if policy.needs:
        assert re.match(r"arXiv:\d{4}\.\d{5}", policy.source)
        assert "uniform variant" in policy.source


def test_the_defaults_are_those_of_papers_and_their_code() -> None:
    def of(name: str, *fields: str) -> tuple[Any, ...]:
        return tuple(getattr(policy_class(name)(), field) for field in fields)

    assert of("streaming_llm", "sinks") == (4,)
    assert of("h2o", "recent") == (0.5,)
    assert of("scissorhands", "window", "recent") == (400, 10)
    assert of("snapkv", "window", "kernel", "prefill_stride") == (32, 5, None)
    assert of("expected_attention", "sinks", "horizon", "prefill_stride") == (4, 512, None)
    assert of("rkv", "weight", "window", "kernel", "stride", "threshold") == (0.07, 8, 7, 128, 0.5)
    assert of("lagkv", "lag", "sinks", "stride") == (128, 4, 128)
    assert of("keydiff", "prefill_stride") == (128,)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_that_differ_have_other_names() -> None:
    some = [Sum(), SumLast(1), SumLast(2), CountLow(2), KeyNorm(), LagDeviation(2, 1), LagDeviation(1, 2)]
    assert len({statistic.name for statistic in some}) == len(some)
    assert SumLast(window=2).name == "SumLast(window=2)"


SAME_NUMBERS = [(1, 1.0), (0, -0.0), (0.0, -0.0), (0.5, np.float64(0.5)), (2**53 + 1, float(2**53))]


def alike(made: Any) -> list[tuple[Any, Any]]:
    """Pairs of what was made with a number in two spellings, for each field and number that it takes."""
    pairs = []
    for each in fields(made):
        for one, other in SAME_NUMBERS:
            try:
                pairs.append((replace(made, **{each.name: one}), replace(made, **{each.name: other})))
            except ConfigError:
                continue
    return pairs


@pytest.mark.parametrize(
    "made",
    [Sum(), SumLast(3), CountLow(3), LagDeviation(3, 1), *(each() for each in STATISTICS[3:7]), FutureAttention()],
)
def test_equal_statistics_have_equal_names(made: Statistic) -> None:
    pairs = alike(made)
    assert all((one == other) == (one.name == other.name) for one, other in pairs)
    assert all(one == other for one, other in pairs)
    assert pairs or type(made) is not KeyRedundancy


@pytest.mark.parametrize("name", BUILT_IN)
def test_equal_policies_need_statistics_of_equal_names(name: str) -> None:
    for one, other in alike(policy_class(name)()):
        assert one == other
        assert [need.name for need in one.needs] == [need.name for need in other.needs]


def test_numbers_are_told_apart_from_what_only_looks_like_them() -> None:
    assert resolve_policy("rkv:threshold=1").needs[1].name == "KeyRedundancy(threshold=1.0)"
    assert repr(KeyRedundancy(-0.0)) == "KeyRedundancy(threshold=0.0)"
    assert H2O(recent=1).num_recent(100) == 1  # a number of tokens, no share
    with pytest.raises(ConfigError, match="threshold: expected a number, got"):
        KeyRedundancy(10**400)


def test_a_value_that_cannot_be_printed_is_described() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shorten(Shy()) == "a Shy that cannot be printed"
    assert shorten(10**5000) == "a huge int"


def test_only_sums_over_all_queries_forbid_to_skip_some() -> None:
    assert Sum().is_over_all_queries
    assert not any(each.is_over_all_queries for each in (SumLast(4), CountLow(4), KeyNorm(), FutureAttention()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SumLast(0),
        lambda: SumLast(2.0),
        lambda: SumLast(True),
        lambda: CountLow(-1),
        lambda: LagDeviation(0, 1),
        lambda: LagDeviation(4, -1),
        lambda: FutureAttention(1, 0),
        lambda: KeyRedundancy(float("nan")),
    ],
)
def test_a_statistic_without_sense_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="expected a"):
        make()


def test_every_statistic_has_words_for_people() -> None:
    some = [
        Sum(),
        SumLast(3),
        CountLow(3),
        LagDeviation(3, 1),
        FutureAttention(),
        *(each() for each in STATISTICS[3:7]),
    ]
    assert {type(each) for each in some} == set(STATISTICS)
    assert len({each.about for each in some}) == len(some)


# --- views and arithmetic ---------------------------------------------------------------------------------------------


def test_a_view_is_read_only_and_leaves_its_makers_arrays_alone() -> None:
    positions = np.array([[0, 1]], np.int32)
    view = view_of(Lane([0, 1], {Sum(): [1.0, 2.0]}))
    for array in (view.positions, view.is_live, view[Sum()]):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
    positions[0, 0] = 5  # still the maker's


def test_what_lies_before_the_last_tokens_of_the_text() -> None:
    view = view_of(Lane([0, 3, 5, 6], length=9), Lane([1]), padding=1)
    assert view.is_before_last(3).tolist() == [[True, True, True, False, False], [False] * 5]
    assert view.is_before_last(np.array([6, 0])).tolist() == [[True, False, False, False, False], [True, *[False] * 4]]


def test_pools_look_at_the_neighbours_that_count() -> None:
    values = np.array([[1.0, 4.0, np.nan, 2.0, 7.0]])
    of = np.array([[True, True, False, True, False]])
    assert pool_mean(values, of, 3).tolist() == [[5 / 3, 5 / 3, 2.0, 2 / 3, 2 / 3]]
    assert pool_max(values, of, 3).tolist() == [[4.0, 4.0, 4.0, 2.0, 2.0]]
    assert pool_max(values, of, 1).tolist() == [[1.0, 4.0, 0.0, 2.0, 0.0]]


def test_softmax_and_total_leave_out_what_does_not_count() -> None:
    values = np.array([[0.0, np.log(3.0), np.nan, 700.0]])
    of = np.array([[True, True, False, False]])
    assert np.allclose(softmax(values, of), [[0.25, 0.75, 0.0, 0.0]])
    assert softmax(values, np.zeros_like(of)).tolist() == [[0.0] * 4]
    assert total(values, of)[0, 0] == np.log(3.0)
    assert total(np.zeros((2, 0)), np.zeros((2, 0), np.bool_)).tolist() == [[0.0], [0.0]]


def test_ranks_count_within_a_run() -> None:
    values = np.array([[9.0, 3.0, 1.0, 2.0, 5.0, 5.0, 4.0, 0.0]])
    assert rank_in_runs(values, first=1, length=3).tolist()[0][1:] == [2, 0, 1, 1, 2, 0, 0]
