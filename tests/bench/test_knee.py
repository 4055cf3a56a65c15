from __future__ import annotations

import pytest

from vtoken.bench.knee import Point, find_knee, limits_up_to, most_sustained, throughput_within


def point(
    limit: int, throughput: float = 1.0, p95: float = 1.0, preemptions: int = 0, peak: int | None = None
) -> Point:
    return Point(limit, limit if peak is None else peak, throughput, p95, p95, preemptions)


def test_limits_grow_by_at_most_a_half() -> None:
    assert limits_up_to(1) == [1]
    assert limits_up_to(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert limits_up_to(48) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]


def test_the_throughput_within_a_limit_is_the_most_that_keeps_it() -> None:
    points = [point(1, 100, 1.0), point(2, 180, 1.05), point(4, 300, 1.06)]
    assert throughput_within(points, 1.05) == 180
    assert throughput_within(points, 0.5) == 0


def test_a_preemption_or_a_limit_that_is_not_reached_is_not_sustained() -> None:
    assert point(4).is_sustained
    assert not point(4, preemptions=1).is_sustained
    assert not point(4, peak=3).is_sustained


@pytest.mark.parametrize("holds", [0, 1, 2, 5, 8, 13, 20])
@pytest.mark.parametrize("known", [[], [1], [4, 8], [2, 16]])
def test_the_most_that_is_sustained_is_found_by_bisection(holds: int, known: list[int]) -> None:
    asked: list[int] = []

    def run(limit: int) -> Point:
        asked.append(limit)
        return point(limit, preemptions=int(limit > holds))

    assert most_sustained(run, 20, [run(limit) for limit in known]) == holds
    assert len(asked) - len(known) <= 5


def test_a_lone_point_is_the_knee() -> None:
    assert find_knee([point(3, 7)]).limit == 3
    with pytest.raises(ValueError, match="at least one point"):
        find_knee([])
