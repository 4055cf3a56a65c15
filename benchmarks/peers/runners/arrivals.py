"""Requests that come at their own times: an open loop, so a slow engine meets a growing queue, not fewer requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.peers.workloads import Request


@dataclass(frozen=True)
class Progress:
    """`num_tokens` new tokens of a request, seen at `at` (seconds of time.perf_counter)."""

    index: int
    num_tokens: int
    at: float
    finished: bool


class ArrivalEngine(Protocol):
    """An engine that takes requests at any time between two calls of `advance`."""

    def submit(self, index: int, request: Request) -> None: ...

    def advance(self, max_wait: float | None) -> list[Progress]:
        """Do a step, or wait for one that runs elsewhere, at most `max_wait` seconds (None: as long as it takes)."""


def drive(
    requests: Sequence[Request],
    engine: ArrivalEngine,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[list[float]]:
    """Submit each request when it is due (they are in order of arrival); when each of its tokens came, in seconds.

    An engine that steps in this thread is handed new requests between two steps, as an engine's own loop would do.
    """
    token_times: list[list[float]] = [[] for _ in requests]
    started = now()
    num_submitted = num_running = 0
    while num_submitted < len(requests) or num_running:
        elapsed = now() - started
        while num_submitted < len(requests) and requests[num_submitted].arrival_s <= elapsed:
            engine.submit(num_submitted, requests[num_submitted])
            num_submitted += 1
            num_running += 1
        due_in = None
        if num_submitted < len(requests):
            due_in = max(0.0, requests[num_submitted].arrival_s - (now() - started))
        if not num_running:
            assert due_in is not None
            sleep(due_in)
            continue
        for progress in engine.advance(due_in):
            token_times[progress.index] += [progress.at - started] * progress.num_tokens
            num_running -= progress.finished
    return token_times
