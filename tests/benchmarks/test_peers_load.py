"""What the peers are fed: prompts, the trace, and the open loop that sends requests when they are due."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import prompts, trace
from benchmarks.peers.prompts import PromptSource
from benchmarks.peers.runners.arrivals import Progress, drive
from benchmarks.peers.runners.protocol import run_arrivals, run_offline
from benchmarks.peers.trace import TraceEntry, load_trace, rescale, synthetic_trace
from benchmarks.peers.workloads import Kind, Request, Spec
from tests.tiny_tokenizers import byte_level


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(0, 5))
def test_prompts_of_a_batch_begin_differently_and_never_overlap(lengths: list[int], seed: int) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(500) for _ in range(5000)]
    places = list(enumerate(ids))  # a token that knows where it was
    source = PromptSource(ids, seed)
    batches = [source.batch(lengths), source.batch(lengths)]
    for batch in batches:
        assert [len(prompt) for prompt in batch] == lengths
        assert len({prompt[0] for prompt in batch}) == len(batch)
    assert [PromptSource(ids, seed).batch(lengths)] == batches[:1]
    tracked = PromptSource(places, seed)  # type: ignore[arg-type]
    cut = [place for _ in range(2) for prompt in tracked.batch(lengths) for place in prompt]
    assert len(set(cut)) == len(cut)


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="too few for 2 more prompts of 80 tokens"):
        PromptSource(list(range(60)), 0).batch([40, 40])


def test_the_corpus_is_real_text_where_there_is_some(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    ids, origin = prompts.corpus(tmp_path, data=tmp_path)
    assert origin == "seeded random token ids"
    assert min(ids) >= 256
    assert max(ids) < 400
    text = tmp_path / prompts.TEXTS[1]
    text.parent.mkdir()
    text.write_text("She sells sea shells.")
    ids, origin = prompts.corpus(tmp_path, data=tmp_path)
    assert origin == text.name
    assert byte_level().decode(ids) == "She sells sea shells."


@given(
    st.lists(st.floats(0, 100), min_size=2, max_size=30).map(sorted).filter(lambda at: at[-1] - at[0] > 1e-3),
    st.floats(0.1, 20),
)
def test_a_rescaled_trace_keeps_its_shape_and_has_the_rate(at: list[float], rate: float) -> None:
    arrivals = rescale([TraceEntry(each, 1, 1) for each in at], rate)
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert (len(at) - 1) / arrivals[-1] == pytest.approx(rate)
    stretch = arrivals[-1] / (at[-1] - at[0])
    assert arrivals == pytest.approx([(each - at[0]) * stretch for each in at])


def test_an_infinite_rate_is_all_at_once() -> None:
    assert rescale([TraceEntry(3.0, 1, 1), TraceEntry(9.0, 1, 1)], math.inf) == [0.0, 0.0]


def test_the_trace_file_is_read_and_requests_too_long_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / trace.TRACE
    path.parent.mkdir()
    path.write_text("timestamp_ms,prompt_tokens,output_tokens\n1500,20,5\n1600,2040,9\n2500,30,0\n")
    entries, origin = load_trace(2, data=tmp_path)
    assert entries == [TraceEntry(1.5, 20, 5), TraceEntry(2.5, 30, 1)]  # an answer has at least one token
    assert "aibrix" in origin
    with pytest.raises(ValueError, match="has 2 requests of at most 2048 tokens, 3 are needed"):
        load_trace(3, data=tmp_path)


def test_without_the_file_the_trace_is_a_seeded_likeness(tmp_path: Path) -> None:
    entries, origin = load_trace(200, data=tmp_path)
    assert origin == "a seeded likeness of ShareGPT"
    assert entries == synthetic_trace(200)
    assert synthetic_trace(200, seed=1) != entries
    assert all(a.at_s < b.at_s for a, b in itertools.pairwise(entries))
    assert all(entry.prompt_tokens + entry.output_tokens <= trace.MAX_TOKENS for entry in entries)
    assert 200 < sorted(entry.prompt_tokens for entry in entries)[100] < 330


@dataclass
class FakeEngine:
    """One token a running request a step; a step takes a second on its own clock."""

    time: float = 100.0
    running: dict[int, int] = field(default_factory=dict)  # index -> tokens left
    submitted: dict[int, float] = field(default_factory=dict)
    shorten: int = 0  # tokens that the last request loses

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def submit(self, index: int, request: Request) -> None:
        self.submitted[index] = self.time
        self.running[index] = request.output_tokens - self.shorten

    def advance(self, max_wait: float | None) -> list[Progress]:
        self.time += 1.0
        made = []
        for index in list(self.running):
            self.running[index] -= 1
            made.append(Progress(index, 1, self.time, self.running[index] == 0))
            if self.running[index] == 0:
                del self.running[index]
        return made


def test_the_open_loop_submits_between_steps_and_sleeps_when_idle() -> None:
    engine = FakeEngine()
    requests = [Request([1], 2, 0.0), Request([2], 1, 0.5), Request([3], 1, 7.0)]
    assert drive(requests, engine, engine.now, engine.sleep) == [[1.0, 2.0], [2.0], [8.0]]
    assert engine.submitted == {0: 100.0, 1: 101.0, 2: 107.0}


@given(st.lists(st.tuples(st.integers(0, 160), st.integers(1, 5)), min_size=1, max_size=15))
def test_every_request_gets_its_tokens_and_none_before_it_is_due(loads: list[tuple[int, int]]) -> None:
    requests = [Request([0], tokens, eighths / 8) for eighths, tokens in sorted(loads)]  # sums of eighths are exact
    engine = FakeEngine()
    token_times = drive(requests, engine, engine.now, engine.sleep)
    for i, (request, times) in enumerate(zip(requests, token_times, strict=True)):
        assert len(times) == request.output_tokens
        assert request.arrival_s <= engine.submitted[i] - 100.0 <= times[0] - 1.0


def spec_of(kind: Kind, runs: list[list[Request]]) -> Spec:
    return Spec(kind, runs, Request([9, 9], 1), "model", {"a": 1}, "peers", 2, 64, 8192)


def test_a_spec_comes_back_from_json() -> None:
    spec = spec_of("batch", [[Request([1, 2, 3], 4, 0.5)], [Request([5], 1)]])
    assert Spec.from_json(spec.to_json()) == spec
    assert spec.longest == 7


@pytest.mark.parametrize("kind", ["batch", "latency"])
def test_offline_runs_warm_up_first_and_time_the_first_token_apart(kind: Kind) -> None:
    calls: list[tuple[list[int], int]] = []

    def generate(asked: Sequence[list[int]], output_tokens: int) -> list[list[int]]:
        [prompt] = asked
        calls.append((prompt, output_tokens))
        return [[prompt[0]] * output_tokens]

    result = run_offline(spec_of(kind, [[Request([1], 3)], [Request([2], 3)]]), generate)
    firsts = [([1], 1)] if kind == "latency" else []
    seconds = [([2], 1)] if kind == "latency" else []
    assert calls == [([9, 9], 1), *firsts, ([1], 3), *seconds, ([2], 3)]
    assert [run["outputs"] for run in result["runs"]] == [[[1, 1, 1]], [[2, 2, 2]]]
    assert all((run["first_token_s"] is not None) == (kind == "latency") for run in result["runs"])


def test_an_answer_of_another_length_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"1 answers of \[2\] tokens, 1 of 3 expected"):
        run_offline(spec_of("batch", [[Request([1], 3)]]), lambda _, n: [[0] * min(n, 2)])
    engine = FakeEngine(shorten=1)
    spec = Spec("arrivals", [[Request([1], 3)]], Request([9], 2), "m", {}, "p", 1, 1, 10)
    with pytest.raises(RuntimeError, match="request 0 got 2 tokens, 3 expected"):
        run_arrivals(spec, engine)
