"""`StepRecorder`: what is measured of each step, and a picture of the engine now and then. In the engine's thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vtoken.base.clock import Clock, MonotonicClock
from vtoken.engine.engine import Engine
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.stats import EngineStats, StepFacts
from vtoken.schedule.sequence import FinishReason, Request, Sequence
from vtoken.server.metric_list import DISTRIBUTIONS, bounds_up_to

REFRESH_SECONDS = 1.0  # between snapshots that nobody asked for: what is served while a step hangs


@dataclass(frozen=True)
class HistogramState:
    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds: of values above the last
    total: float  # the sum of all values


class Histogram:
    """Counts of values by upper bounds, included."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._array = np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def enter(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def enter_all(self, values: list[float]) -> None:
        found = np.bincount(np.searchsorted(self._array, values), minlength=len(self._counts)).tolist()
        self._counts = [count + more for count, more in zip(self._counts, found, strict=True)]
        self._total += sum(values)

    @property
    def state(self) -> HistogramState:
        return HistogramState(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True)
class Snapshot:
    """One moment of an engine, taken between two steps."""

    time: float
    stats: EngineStats
    histograms: Mapping[str, HistogramState]


class StepRecorder:
    """A step listener. It knows nothing of the `AsyncLLM` that calls it, so it keeps none from being forgotten."""

    def __init__(self, max_model_len: int, clock: Clock | None = None) -> None:
        self.latest: Snapshot | None = None
        """May be read by any thread."""
        self.clock = clock or MonotonicClock()
        self._histograms = {
            each.name: Histogram(bounds_up_to(max_model_len) if each.bounds is None else each.bounds)
            for each in DISTRIBUTIONS
        }
        self._last: dict[Request, dict[Sequence, float]] = {}  # of those that answer: when each got its last token

    def __call__(self, engine: Engine, outputs: list[RequestOutput]) -> None:
        self._enter(engine.last_step)
        if self.latest is None or self.clock.now() - self.latest.time >= REFRESH_SECONDS:
            self.take(engine)

    def take(self, engine: Engine) -> Snapshot:
        """What the engine is now, and what was recorded so far: all of one moment."""
        histograms = {name: histogram.state for name, histogram in self._histograms.items()}
        self.latest = Snapshot(self.clock.now(), engine.stats(), histograms)
        return self.latest

    def _enter(self, step: StepFacts) -> None:
        found, last, now, gaps = self._histograms, self._last, step.time, []
        for sequence in step.drawn:
            request = sequence.request
            times = last.get(request)
            if times is None:
                times = last[request] = {}
                assert request.first_token_time is not None, "it has just got a token"
                found["time_to_first_token_seconds"].enter(request.first_token_time - request.arrival_time)
            before = times.get(sequence)
            if before is not None:
                gaps.append(now - before)
            times[sequence] = now
        if gaps:
            found["inter_token_latency_seconds"].enter_all(gaps)
        if step.num_tokens:
            found["iteration_tokens_total"].enter(step.num_tokens)
        for request in step.finished:
            self._enter_end(request, last.pop(request, None))

    def _enter_end(self, request: Request, times: dict[Sequence, float] | None) -> None:
        """`times` of its last tokens; None: nothing was drawn for it, or it searched beams."""
        found = self._histograms
        arrival, first_run, first_token = request.arrival_time, request.first_scheduled_time, request.first_token_time
        assert request.finish_time is not None, "it has ended"
        if first_run is None:
            return
        found["request_queue_time_seconds"].enter(first_run - arrival)
        if first_token is None:
            return
        if times is None:
            found["time_to_first_token_seconds"].enter(first_token - arrival)
        # The clock was read at the end of the step, a little after the request had its token.
        last_token = request.finish_time if times is None else max(first_token, *times.values())
        found["request_prefill_time_seconds"].enter(first_token - first_run)
        found["request_decode_time_seconds"].enter(last_token - first_token)
        found["request_inference_time_seconds"].enter(last_token - first_run)
        if any(each.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) for each in request.sequences):
            return
        lengths = [sequence.num_output_tokens for sequence in request.sequences]
        longest = max(lengths)
        found["e2e_request_latency_seconds"].enter(request.finish_time - arrival)
        if longest > 1:
            found["request_time_per_output_token_seconds"].enter((last_token - first_token) / (longest - 1))
        found["request_prompt_tokens"].enter(request.num_prompt_tokens)
        found["request_prefill_kv_computed_tokens"].enter(request.num_prompt_tokens - request.num_cached_tokens)
        found["request_generation_tokens"].enter(sum(lengths))
        found["request_max_num_generation_tokens"].enter(longest)
        found["request_params_n"].enter(request.params.n)
        found["request_params_max_tokens"].enter(request.params.max_tokens or 0)
        found["request_evicted_tokens"].enter(sum(len(sequence.died_at) for sequence in request.sequences))
