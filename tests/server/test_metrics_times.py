"""Histograms are those of the times at which things happened: a clock turned by hand, and a recount from outputs."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

import pytest

from tests.driving import StepFailure
from tests.server.metered import load, make_engine
from vtoken import SamplingParams
from vtoken.base.clock import ManualClock
from vtoken.server.metric_list import DISTRIBUTIONS, bounds_up_to
from vtoken.server.step_recorder import REFRESH_SECONDS, Histogram, StepRecorder


def run(engine, asks, aborts=()):
    """Answer all; returns (the last snapshot, (time, outputs) of each step). `aborts` are (step, number)."""
    recorder = StepRecorder(engine.scheduler.config.max_model_len, engine._clock)
    for ask in asks:
        engine.add_request(str(ask.number), ask.prompt, ask.params)
    steps = []
    while engine.has_unfinished_requests():
        for step, number in aborts:
            if step == len(steps):
                engine.abort_request(str(number))
        outputs = engine.step()
        recorder(engine, outputs)
        steps.append((engine._clock.now(), outputs))
    return recorder.take(engine), steps


@pytest.mark.parametrize("host", [0, 30])
def test_every_time_is_in_its_bucket(host):
    clock = ManualClock(100.0)
    engine = make_engine(30, num_host_blocks=host, clock=clock)
    engine.executor.seconds = lambda step: (0.01, 0.07, 0.9, 0.3)[step % 4]
    snapshot, steps = run(engine, load(25), aborts=((3, 2), (3, 24), (20, 5)))

    expected = defaultdict(list)
    lengths, last = defaultdict(int), {}
    for time, outputs in steps:
        for output in outputs:
            metrics = output.metrics
            for choice in output.outputs:
                key = output.request_id, choice.index
                if len(choice.token_ids) > lengths[key]:
                    assert len(choice.token_ids) == lengths[key] + 1, "a token a step"
                    if lengths[key]:
                        expected["inter_token_latency_seconds"].append(time - last[key])
                    lengths[key], last[key] = len(choice.token_ids), time
            if not output.finished:
                continue
            if metrics.first_scheduled_time is not None:
                expected["request_queue_time_seconds"].append(metrics.first_scheduled_time - metrics.arrival_time)
            ends = [last[output.request_id, choice.index] for choice in output.outputs if choice.token_ids]
            if ends:
                first, end = metrics.first_token_time, max(ends)
                expected["time_to_first_token_seconds"].append(first - metrics.arrival_time)
                expected["request_prefill_time_seconds"].append(first - metrics.first_scheduled_time)
                expected["request_decode_time_seconds"].append(end - first)
                expected["request_inference_time_seconds"].append(end - metrics.first_scheduled_time)
            if all(choice.finish_reason in ("stop", "length") for choice in output.outputs):
                expected["e2e_request_latency_seconds"].append(metrics.finished_time - metrics.arrival_time)
                longest = max(len(choice.token_ids) for choice in output.outputs)
                if longest > 1:
                    expected["request_time_per_output_token_seconds"].append((end - first) / (longest - 1))
    assert engine.stats().scheduler.preemptions > 0
    assert len(expected["request_queue_time_seconds"]) == 24  # one was aborted before it ran
    assert len(expected["e2e_request_latency_seconds"]) == 22
    for name, values in expected.items():
        state = snapshot.histograms[name]
        counts = [0] * (len(state.bounds) + 1)
        for each in values:
            counts[bisect_left(state.bounds, each)] += 1
        assert state.counts == tuple(counts), name
        assert state.total == pytest.approx(sum(values)), name
        assert sum(count > 0 for count in counts) > 1, f"{name}: one bucket tells nothing"


def test_beams_have_no_gaps_and_one_first_token():
    clock = ManualClock()
    engine = make_engine(100, clock=clock)
    engine.executor.seconds = lambda step: 0.5
    engine.add_request("b", [9] * 10, SamplingParams(use_beam_search=True, n=3, temperature=0, max_tokens=6))
    recorder = StepRecorder(400, clock)
    while engine.has_unfinished_requests():
        recorder(engine, engine.step())
    found = recorder.take(engine).histograms
    assert sum(found["inter_token_latency_seconds"].counts) == 0
    assert found["time_to_first_token_seconds"].total == 0.5
    assert found["request_decode_time_seconds"].total == 2.5
    assert found["request_generation_tokens"].total == 18


def test_a_failed_step_is_no_gap_and_a_preemption_is_part_of_one():
    clock = ManualClock()
    engine = make_engine(100, clock=clock)
    engine.executor.seconds = lambda step: 1.0
    fails = {4}

    def before(plan):
        if plan.step in fails:
            clock.advance(10.0)
            raise StepFailure

    engine.executor.before = before
    for name in "ab":
        engine.add_request(name, [9] * 4, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    recorder = StepRecorder(400, clock)
    while engine.has_unfinished_requests():
        recorder(engine, engine.step())
    gaps = recorder.take(engine).histograms["inter_token_latency_seconds"]
    assert sum(gaps.counts) == 14
    assert sum(gaps.counts[bisect_left(gaps.bounds, 10.0) :]) == 2  # of each choice the one in which the step failed


def test_what_is_remembered_goes_with_the_requests():
    engine = make_engine(30)
    recorder = StepRecorder(120)
    for ask in load(20):
        engine.add_request(str(ask.number), ask.prompt, ask.params)
    engine.abort_request("3")
    while engine.has_unfinished_requests():
        recorder(engine, engine.step())
    assert recorder._last == {}


def test_snapshots_nobody_asked_for_are_not_taken_at_every_step():
    clock = ManualClock()
    engine = make_engine(100, clock=clock)
    engine.executor.seconds = lambda step: REFRESH_SECONDS / 4
    recorder = StepRecorder(400, clock)
    engine.add_request("a", [9] * 4, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    taken = set()
    while engine.has_unfinished_requests():
        recorder(engine, engine.step())
        assert clock.now() - recorder.latest.time < REFRESH_SECONDS
        taken.add(recorder.latest.time)
    assert len(taken) == 10


def test_bounds_are_included():
    histogram = Histogram((1.0, 2.0))
    for each in (1.0, 2.0, 2.5):
        histogram.enter(each)
    histogram.enter_all([1.0, 2.0, 2.5, 0.0])
    assert histogram.state.counts == (3, 2, 2)
    assert histogram.state.total == 11.0


def test_bounds_of_tokens_go_up_to_the_longest_text():
    assert bounds_up_to(1) == (1,)
    assert bounds_up_to(100) == (1, 2, 5, 10, 20, 50, 100)
    assert bounds_up_to(8192)[-2:] == (2000, 5000)
    assert all(list(each.bounds) == sorted(set(each.bounds)) for each in DISTRIBUTIONS if each.bounds is not None)
