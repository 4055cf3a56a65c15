"""Lengths and arrivals of chat requests: a real trace where there is one, a seeded likeness where not."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.prompts import DATA

# ShareGPT conversations as replayed by vllm-project/aibrix: columns timestamp_ms, prompt_tokens, output_tokens.
TRACE: Final = "aibrix_sharegpt/8min_up_and_down.lengths.csv"
MAX_TOKENS: Final = 2048  # prompt and answer: a slot of llama.cpp's server must hold the longest request


@dataclass(frozen=True)
class TraceEntry:
    """One request: when it came, in seconds, and its lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def load_trace(num_requests: int, data: Path = DATA) -> tuple[list[TraceEntry], str]:
    """(the first requests of the trace, where they are from), requests above MAX_TOKENS left out.

    Raises ValueError if the trace has fewer.
    """
    path = data / TRACE
    if not path.is_file():
        return synthetic_trace(num_requests), "a seeded likeness of ShareGPT"
    with path.open(newline="") as file:
        rows = [
            TraceEntry(int(row["timestamp_ms"]) / 1e3, int(row["prompt_tokens"]), max(1, int(row["output_tokens"])))
            for row in csv.DictReader(file)
        ]
    fitting = [row for row in rows if row.prompt_tokens + row.output_tokens <= MAX_TOKENS]
    if len(fitting) < num_requests:
        raise ValueError(
            f"{path} has {len(fitting)} requests of at most {MAX_TOKENS} tokens, {num_requests} are needed"
        )
    return fitting[:num_requests], f"{TRACE}, its own arrivals rescaled"


def synthetic_trace(num_requests: int, seed: int = 0) -> list[TraceEntry]:
    """Poisson arrivals at 1 a second; log-normal lengths with the medians and tails of the real trace."""
    draw = random.Random(seed)
    now, entries = 0.0, []
    for _ in range(num_requests):
        now += draw.expovariate(1.0)
        prompt = min(1024, max(8, round(draw.lognormvariate(math.log(264), 0.7))))
        output = min(1024, max(1, round(draw.lognormvariate(math.log(34), 1.2))))
        entries.append(TraceEntry(now, prompt, output))
    return entries


def rescale(entries: Sequence[TraceEntry], rate: float) -> list[float]:
    """Arrival times in seconds, the first at 0: those of the entries, stretched to `rate` requests a second on average.

    `rate` math.inf puts them all at 0.
    """
    start = entries[0].at_s
    span = entries[-1].at_s - start
    if math.isinf(rate) or span == 0:
        return [0.0] * len(entries)
    factor = (len(entries) - 1) / rate / span
    return [(entry.at_s - start) * factor for entry in entries]
