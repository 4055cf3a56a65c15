"""The figures that the peer comparison makes of measured times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.figures import (
    Goal,
    Spread,
    arrival_figures,
    common_prefix,
    offline_figures,
    paired_ratios,
    percentile,
)
from benchmarks.peers.workloads import Request

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(NUMBERS, st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_a_percentile_is_a_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    smaller = [value for value in values if value < found]
    assert not smaller or sum(value <= max(smaller) for value in values) < share * len(values)


def test_spread_is_median_least_and_greatest() -> None:
    assert Spread.of([3.0, 1.0, 8.0]) == Spread(3.0, 1.0, 8.0)
    assert Spread.of([3.0, 1.0]) == Spread(2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1), ([1], [1, 2], 1), ([4], [5], 0)]
)
def test_common_prefix(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(a, b) == length


def test_ratios_pair_the_rounds_that_both_have() -> None:
    assert paired_ratios({0: 10.0, 1: 30.0, 2: 8.0}, {0: 5.0, 2: 2.0, 3: 1.0}) == [2.0, 4.0]


def test_a_batch_counts_all_its_tokens() -> None:
    run = [Request([1] * 6, 4), Request([2] * 6, 4)]
    figures = offline_figures([run], [{"seconds": 2.0, "first_token_s": None}])
    assert figures == {"seconds": 2.0, "output_tok_s": 4.0, "total_tok_s": 10.0}


def test_latency_takes_medians_and_leaves_the_first_token_out_of_the_decode_rate() -> None:
    runs = [[Request([1] * 8, 5)]] * 3
    measured = [{"seconds": s, "first_token_s": f} for s, f in ((3.0, 1.0), (9.0, 0.5), (2.5, 2.0))]
    figures = offline_figures(runs, measured)
    assert figures["seconds"] == 3.0
    assert figures["first_token_s"] == 1.0
    assert figures["output_tok_s"] == pytest.approx(5 / 3)
    assert figures["decode_tok_s"] == pytest.approx(4 / 2)


def test_arrivals_count_from_when_a_request_was_due() -> None:
    requests = [Request([1], 3, 0.0), Request([2], 2, 1.0), Request([3], 1, 4.0)]
    times = [[0.5, 1.0, 2.5], [3.0, 3.1], [4.25]]
    figures = arrival_figures(requests, times, Goal(first_token_s=1.0, between_tokens_s=1.0))
    assert figures["first_token_p50_s"] == 0.5
    assert figures["first_token_p99_s"] == 2.0  # request 1 was due at 1
    assert figures["between_tokens_p50_s"] == 0.5
    assert figures["between_tokens_p99_s"] == 1.5
    assert figures["seconds"] == 4.25
    assert figures["backlog_s"] == 0.25
    assert figures["output_tok_s"] == pytest.approx(6 / 4.25)
    # Request 0: mean gap of exactly 1, good. Request 1 waited too long. Request 2 has no gap, good.
    assert figures["good_share"] == pytest.approx(2 / 3)
    assert figures["goodput_requests_s"] == pytest.approx(2 / 4.25)


def test_arrivals_of_one_token_each_have_no_gaps() -> None:
    figures = arrival_figures([Request([1], 1)], [[0.5]], Goal(1.0, 0.1))
    assert "between_tokens_p50_s" not in figures
    assert figures["good_share"] == 1.0
