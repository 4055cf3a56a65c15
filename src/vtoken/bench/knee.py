"""Sweeps over concurrency: the most that runs without preemption, the knee, the most throughput within a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One run with at most `limit` requests at once."""

    limit: int
    peak_running: int  # that ran at once in fact
    throughput: float  # answer tokens a second
    decode_p50: float  # s of a step in which every sequence decodes
    decode_p95: float
    preemptions: int

    @property
    def is_sustained(self) -> bool:
        """As many as allowed ran at once, and nobody had to go."""
        return self.preemptions == 0 and self.peak_running >= self.limit


def find_knee(points: Iterable[Point], tolerance: float = 0.05) -> Point:
    """The smallest concurrency such that no larger one has more than `tolerance` more throughput."""
    ordered = sorted(points, key=lambda point: point.limit)
    for i, point in enumerate(ordered):
        if all(later.throughput <= point.throughput * (1 + tolerance) for later in ordered[i + 1 :]):
            return point
    raise ValueError("a knee is sought among at least one point")


def throughput_within(points: Iterable[Point], p95_limit: float) -> float:
    """The most answer tokens a second among the points that keep the limit; 0 if none does."""
    return max((point.throughput for point in points if point.decode_p95 <= p95_limit), default=0.0)


def limits_up_to(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to `most`, itself included: steps of at most a half."""
    limits, step = [1], 1
    while limits[-1] < most:
        following = limits[-1] + step
        limits.append(min(following, most))
        if following & (following - 1) == 0:  # a power of two
            step = max(1, following // 2)
    return limits


def most_sustained(run: Callable[[int], Point], most: int, points: Iterable[Point] = ()) -> int:
    """The largest concurrency that is sustained, from 1 to `most`: found by bisection, 0 if not even 1 is.

    It is taken to be monotonic: whoever sustains n sustains fewer. `points` are known already.
    """
    known = list(points)
    low = max((point.limit for point in known if point.is_sustained), default=0)
    high = min((point.limit for point in known if not point.is_sustained and point.limit > low), default=most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if run(middle).is_sustained else (low, middle)
    return low
