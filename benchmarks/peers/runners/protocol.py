"""What all runners share: reading the spec, timing, checking the number of tokens, writing the result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.runners.arrivals import ArrivalEngine, drive
from benchmarks.peers.workloads import Request, Spec

MARK: Final = "PEERS-RESULT "  # what stands before the one line of JSON that a runner prints

# Answers prompts with exactly so many tokens each, greedily, and returns the token ids of each answer.
Generate = Callable[[Sequence[list[int]], int], list[list[int]]]


def read_spec() -> Spec:
    """The spec whose path is the only argument."""
    return Spec.from_json(json.loads(Path(sys.argv[1]).read_text()))


def write_result(result: dict[str, Any]) -> None:
    print(MARK + json.dumps(result), flush=True)


def run_offline(spec: Spec, generate: Generate) -> dict[str, Any]:
    """Warm up, then time each run; in latency workloads also a run of the same prompts that stops at the first token.

    Raises RuntimeError if an engine answers with another number of tokens than asked.
    """

    def timed(prompts: list[list[int]], output_tokens: int) -> tuple[float, list[list[int]]]:
        started = time.perf_counter()
        outputs = generate(prompts, output_tokens)
        seconds = time.perf_counter() - started
        lengths = sorted({len(output) for output in outputs})
        if len(outputs) != len(prompts) or lengths != [output_tokens]:
            raise RuntimeError(
                f"{len(outputs)} answers of {lengths} tokens, {len(prompts)} of {output_tokens} expected"
            )
        return seconds, outputs

    timed([spec.warm_up.prompt], spec.warm_up.output_tokens)
    measured: list[dict[str, Any]] = []
    for run in spec.runs:
        prompts = [request.prompt for request in run]
        output_tokens = run[0].output_tokens
        first = timed(prompts, 1)[0] if spec.kind == "latency" else None
        seconds, outputs = timed(prompts, output_tokens)
        measured.append({"seconds": seconds, "first_token_s": first, "outputs": outputs if len(run) == 1 else None})
    return {"runs": measured}


def run_arrivals(spec: Spec, engine: ArrivalEngine) -> dict[str, Any]:
    """Warm up, then the one run of an arrivals workload.

    Raises RuntimeError if a request got another number of tokens than asked.
    """
    drive([Request(spec.warm_up.prompt, spec.warm_up.output_tokens)], engine)
    [requests] = spec.runs
    token_times = drive(requests, engine)
    for i, (request, times) in enumerate(zip(requests, token_times, strict=True)):
        if len(times) != request.output_tokens:
            raise RuntimeError(f"request {i} got {len(times)} tokens, {request.output_tokens} expected")
    return {"token_times": token_times}
