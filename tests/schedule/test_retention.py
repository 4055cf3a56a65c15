"""Where tokens die, how many may live at once, and what is refused: arithmetic, without any books."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vtoken.base.errors import RequestError
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.h2o import H2O
from vtoken.policies.snapkv import SnapKV
from vtoken.policies.statistics import Statistic, SumLast
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.schedule.retention import AT_THE_END, KEEPS_ALL, Retention, RetentionSettings


@dataclass(frozen=True, kw_only=True)
class Youngest(Policy):
    """Keeps the youngest tokens; looks at the last `looks_at` queries, and protects nothing."""

    name = "youngest"
    source = "a test"
    recent: int | float = 0
    looks_at: int = 1

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (SumLast(self.looks_at),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return view.positions.astype(np.float64)


def retention(budget: int | float, stride: int = 16, prefill_stride: int = 32, looks_at: int = 1) -> Retention:
    return Retention(Youngest(looks_at=looks_at), budget, "always", stride, prefill_stride)


def walk(what: Retention, prompt: int, length: int) -> tuple[list[int], int, int]:
    """(the places, the most live tokens in the prompt, and after it) of a text that grows token by token."""
    places, live, at = [], 0, 0
    peaks = [0, 0]
    while at < length:
        place = min(what.next_place(at, live, prompt), length)
        live += place - at
        peaks[place > prompt] = max(peaks[place > prompt], live)
        at = place
        if at < length or at == prompt:
            places.append(at)
        live = min(live, what.budget_at(at))
    return places, *peaks


def test_places_of_a_short_prompt_are_its_end_and_then_every_stride() -> None:
    assert walk(retention(24, stride=16), prompt=20, length=70)[0] == [20, 36, 52, 68]


def test_a_long_prompt_is_cut_whenever_a_stride_above_the_budget_lives() -> None:
    places, in_prompt, after = walk(retention(24, stride=16, prefill_stride=32), prompt=150, length=200)
    assert places == [56, 88, 120, 150, 166, 182, 198]
    assert (in_prompt, after) == (56, 40)


def test_at_the_end_only() -> None:
    assert walk(retention(24, prefill_stride=AT_THE_END), prompt=150, length=170) == ([150, 166], 150, 40)


def test_two_decisions_never_look_at_the_same_queries() -> None:
    """At 120 the next place is the end of the prompt at 125, before which it looks at 8 queries: so 120 is left out."""
    places, in_prompt, _ = walk(retention(24, stride=16, prefill_stride=32, looks_at=8), prompt=125, length=130)
    assert places == [56, 88, 125]
    assert in_prompt == 24 + 37


def test_a_share_of_the_text_grows_with_it() -> None:
    half = retention(0.5, stride=10, prefill_stride=10)
    assert [half.budget_at(length) for length in (1, 2, 3, 100)] == [1, 1, 2, 50]
    places, *_ = walk(half, prompt=60, length=90)
    # live - 0.5 L reaches 10 at 20; 10 of 20 stay, and so on.
    assert places == [20, 40, 60, 70, 80]


@given(
    budget=st.one_of(st.integers(1, 100), st.floats(0.05, 0.95)),
    stride=st.integers(8, 40),
    prefill_stride=st.one_of(st.just(AT_THE_END), st.integers(8, 60)),
    looks_at=st.integers(1, 8),
    prompt=st.integers(1, 300),
    answer=st.integers(1, 100),
)
def test_no_text_ever_has_more_than_its_peaks(
    budget: int | float, stride: int, prefill_stride: int, looks_at: int, prompt: int, answer: int
) -> None:
    what = retention(budget, stride, prefill_stride, looks_at)
    places, in_prompt, after = walk(what, prompt, prompt + answer)
    assert in_prompt <= what.peak_in_prompt(prompt)
    assert after <= what.peak_after_prompt(prompt + answer)
    assert prompt in places
    gaps = np.diff([0, *places])
    assert (gaps[1:] >= looks_at).all(), "windows overlap"


def test_what_may_come_from_the_prefix_cache() -> None:
    assert Retention(H2O(), 24, "always", 16, 32).most_matched(200) == 0, "sums over all queries need all queries"
    assert Retention(H2O(), 24, "pressure", 16, 32).most_matched(200) == 200
    assert retention(24, looks_at=8).most_matched(200) == 56 - 8
    assert retention(24, prefill_stride=AT_THE_END, looks_at=8).most_matched(200) == 200 - 8
    assert Retention(StreamingLLM(), 24, "always", 16, 32).most_matched(200) == 55


def test_settings_of_a_request_go_before_those_of_the_engine() -> None:
    engine = RetentionSettings(H2O(), 100, "always", 16, 64)
    assert KEEPS_ALL.resolve(engine, 16) == Retention(H2O(), 100, "always", 16, 64)
    own = RetentionSettings(SnapKV(), 0.5, "pressure", 64, AT_THE_END, ((0, 4),))
    assert own.resolve(engine, 16) == Retention(SnapKV(), 0.5, "pressure", 64, AT_THE_END, ((0, 4),))
    assert RetentionSettings(budget=7).resolve(engine, 16) == Retention(H2O(), 7, "always", 16, 64)
    assert KEEPS_ALL.resolve(KEEPS_ALL, 16) is None


def test_strides_default_to_the_policys_or_to_a_block() -> None:
    def strides(policy: Policy) -> tuple[int, int]:
        resolved = RetentionSettings(policy, 1000).resolve(KEEPS_ALL, 16)
        assert resolved is not None
        return resolved.stride, resolved.prefill_stride

    assert strides(H2O()) == (16, 512)
    assert strides(SnapKV(window=32)) == (32, AT_THE_END), "a window is no longer than a stride"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (RetentionSettings(budget=5), "kv_budget"),
        (RetentionSettings(policy=H2O()), "kv_policy"),
        (RetentionSettings(trigger="always"), "kv_trigger"),
        (RetentionSettings(pins=((0, 3),)), "kv_pin"),
        (RetentionSettings(stride=3), "kv_stride"),
        (RetentionSettings(prefill_stride=3), "kv_prefill_stride"),
    ],
)
def test_half_of_the_settings_is_refused(settings: RetentionSettings, field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}: has no effect without a kv_") as error:
        settings.resolve(KEEPS_ALL, 16)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("what", "field", "message"),
    [
        (Retention(StreamingLLM(), 4, "always", 16, 32), "kv_budget", "at least 6"),
        (Retention(StreamingLLM(), 10, "always", 16, 32, ((4, 10),)), "kv_budget", "6 pinned ones"),
        (Retention(StreamingLLM(), 50, "always", 16, 32, ((4, 101),)), "kv_pin", "prompt, which has 100"),
        (Retention(SnapKV(window=32), 64, "always", 16, AT_THE_END), "kv_stride", "at least 32, got 16"),
        (Retention(SnapKV(window=32), 64, "always", 32, 31), "kv_prefill_stride", "at least 32, got 31"),
    ],
)
def test_what_cannot_work_is_refused_in_words(what: Retention, field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        what.check(100, 16)
    assert error.value.field == field


def test_pins_may_overlap_and_reach_the_end_of_the_prompt() -> None:
    Retention(StreamingLLM(), 20, "always", 16, 32, ((0, 8), (4, 10), (95, 100))).check(100, 16)
