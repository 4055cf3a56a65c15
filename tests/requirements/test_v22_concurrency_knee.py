"""V22: a concurrency-knee finder: it picks the smaller concurrency when the larger gains less than a tolerance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vtoken.bench.knee import Point, find_knee


def points(**throughput: float) -> list[Point]:
    return [Point(int(limit[1:]), 1, value, 1.0, 1.0, 0) for limit, value in throughput.items()]


def test_the_smaller_is_picked_where_the_larger_gains_less_than_the_tolerance() -> None:
    assert find_knee(points(c4=100, c8=104), tolerance=0.05).limit == 4
    assert find_knee(points(c4=100, c8=106), tolerance=0.05).limit == 8


def test_small_gains_that_add_up_are_not_overlooked() -> None:
    # Each step gains 4 %, all together 12 %.
    assert find_knee(points(c1=100, c2=104, c4=108, c8=112), tolerance=0.05).limit == 4


def test_a_dip_on_the_way_is_no_knee() -> None:
    assert find_knee(points(c1=100, c2=90, c4=200), tolerance=0.05).limit == 4


@given(
    values=st.lists(st.floats(1, 1000), min_size=1, max_size=10),
    tolerance=st.floats(0, 1),
    order=st.randoms(use_true_random=False),
)
def test_no_larger_concurrency_gains_more_than_the_tolerance_and_each_smaller_one_is_beaten(
    values: list[float], tolerance: float, order: object
) -> None:
    given_points = [Point(i + 1, 1, value, 1.0, 1.0, 0) for i, value in enumerate(values)]
    shuffled = given_points.copy()
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    knee = find_knee(shuffled, tolerance).limit
    gains = [max(values[i + 1 :], default=0) > values[i] * (1 + tolerance) for i in range(len(values))]
    assert gains[: knee - 1] == [True] * (knee - 1)
    assert not gains[knee - 1]
