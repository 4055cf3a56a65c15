"""From what a runner measured to the figures of a table. Plain functions of numbers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.workloads import Request


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers share from their beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


@dataclass(frozen=True)
class Goal:
    """What a request of W5 must reach to count as good: seconds to the first token, mean seconds between tokens."""

    first_token_s: float
    between_tokens_s: float


def offline_figures(runs: Sequence[Sequence[Request]], measured: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Figures of batch, latency and prefill cells; medians where a process made several runs.

    `measured[i]` of run i: seconds, and first_token_s where it was measured. decode_tok_s leaves out the first token.
    """
    seconds = statistics.median(run["seconds"] for run in measured)
    outputs = sum(request.output_tokens for request in runs[0])
    prompts = sum(len(request.prompt) for request in runs[0])
    figures = {"seconds": seconds, "output_tok_s": outputs / seconds, "total_tok_s": (prompts + outputs) / seconds}
    if all(run.get("first_token_s") is not None for run in measured):
        first = statistics.median(run["first_token_s"] for run in measured)
        figures["first_token_s"] = first
        if outputs > 1 and seconds > first:
            figures["decode_tok_s"] = (outputs - 1) / (seconds - first)
    return figures


def arrival_figures(
    requests: Sequence[Request], token_times: Sequence[Sequence[float]], goal: Goal
) -> dict[str, float]:
    """Figures of an open-loop run. `token_times[i]`: when each token of request i came, seconds from the run's start.

    A wait counts from when a request was due, so a busy engine cannot hide it. Goodput: requests a second that reached
    the goal, over the time until the last answer. backlog_s: how long the engine worked on after the last arrival.
    """
    waits = [times[0] - request.arrival_s for request, times in zip(requests, token_times, strict=True)]
    gaps = [b - a for times in token_times for a, b in itertools.pairwise(times)]
    means = [(times[-1] - times[0]) / max(1, len(times) - 1) for times in token_times]
    good = sum(w <= goal.first_token_s and m <= goal.between_tokens_s for w, m in zip(waits, means, strict=True))
    end = max(times[-1] for times in token_times)
    figures = {f"first_token_p{p}_s": percentile(waits, p / 100) for p in (50, 95, 99)}
    figures |= {f"between_tokens_p{p}_s": percentile(gaps, p / 100) for p in (50, 95, 99)} if gaps else {}
    return figures | {
        "seconds": end,
        "output_tok_s": sum(map(len, token_times)) / end,
        "requests_s": len(requests) / end,
        "goodput_requests_s": good / end,
        "good_share": good / len(requests),
        "backlog_s": end - max(request.arrival_s for request in requests),
    }


def paired_ratios(slower: dict[int, float], faster: dict[int, float]) -> list[float]:
    """slower / faster of each round that has both: neighbours in time, so the machine's moods cancel."""
    return [slower[i] / faster[i] for i in sorted(slower.keys() & faster.keys())]
