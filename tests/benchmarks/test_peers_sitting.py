"""A sitting takes engines in turn, remembers what it measured, and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import prompts
from benchmarks.peers import sitting as sitting_module
from benchmarks.peers.cell import Outcome
from benchmarks.peers.engines import Engine
from benchmarks.peers.figures import Goal
from benchmarks.peers.records import Record, RecordFile, fingerprint, source_hash
from benchmarks.peers.sitting import Options, Sitting, order
from benchmarks.peers.workloads import Spec, Workload

A = Engine("a", "transformers", "float32")
B = Engine("b", "transformers", "float32", {"dtype": "x"})
INFO = Engine("info", "transformers", "float32", information=True)
BATCH = Workload("W1", "small", "batch", 2, 4, 3)
LATENCY = Workload("W3", "single", "latency", 1, 4, 3, repeats=2)
ARRIVALS = Workload("W5", "chat", "arrivals", 4)


class Runner:
    """Stands in for the processes: counts calls, answers at once, and does what `special` says for (engine, call)."""

    def __init__(self, special: Callable[[str, int], Outcome | None] = lambda engine, call: None) -> None:
        self.calls: list[str] = []
        self.specs: list[Spec] = []
        self._special = special

    def __call__(self, engine: Engine, spec: Spec, folder: Path, timeout_s: float) -> Outcome:
        self.calls.append(engine.name)
        self.specs.append(spec)
        return self._special(engine.name, len(self.calls)) or answer(spec)


def answer(spec: Spec, seconds: float = 2.0, others: float = 0.0) -> Outcome:
    result: dict[str, Any] = {"startup_s": 1.0, "version": "1"}
    if spec.kind == "arrivals":
        result["token_times"] = [[request.arrival_s + seconds] * request.output_tokens for request in spec.runs[0]]
    else:
        result["runs"] = [
            {"seconds": seconds, "first_token_s": 0.5, "outputs": [[1, 2, 3]] if len(run) == 1 else None}
            for run in spec.runs
        ]
    return Outcome(result, None, False, seconds + 1, others)


@pytest.fixture(autouse=True)
def corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "corpus", lambda model: (list(range(50_000)), "numbers"))


def options(workloads: Sequence[Workload] = (BATCH,), engines: Sequence[Engine] = (A, B), **more: Any) -> Options:
    defaults: dict[str, Any] = {"rounds": 3, "info_rounds": 1, "timeout_s": 5.0, "goal": Goal(1.0, 0.1)}
    return Options(workloads, engines, **(defaults | more))


def sit(folder: Path, runner: Runner, asked: Options) -> tuple[Sitting, list[Record]]:
    sitting = Sitting(folder, asked, Path("model"), runner, progress=lambda line: None)
    return sitting, sitting.run()


def test_engines_take_turns_and_informational_ones_run_less(tmp_path: Path) -> None:
    cells = [
        (cell.workload.name, cell.round, cell.engine.name) for cell in order(options((BATCH, LATENCY), (A, INFO, B)))
    ]
    first = [("W1", 0, "a"), ("W1", 0, "info"), ("W1", 0, "b"), ("W1", 1, "a"), ("W1", 1, "b")]
    assert cells[:5] == first
    assert cells[7] == ("W3", 0, "a")
    runner = Runner()
    sit(tmp_path, runner, options())
    assert runner.calls == ["a", "b"] * 3


def test_every_engine_and_round_gets_the_same_requests(tmp_path: Path) -> None:
    runner = Runner()
    sit(tmp_path, runner, options((BATCH, LATENCY)))
    batch, latency = runner.specs[:6], runner.specs[6:]
    assert all(spec.runs == batch[0].runs and spec.warm_up == batch[0].warm_up for spec in batch)
    assert all(spec.runs == latency[0].runs for spec in latency)
    assert [len(run) for run in latency[0].runs] == [1, 1]
    assert latency[0].runs[0] != latency[0].runs[1]  # fresh prompts
    assert batch[1].settings == {"dtype": "x"}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    def interrupt(engine: str, call: int) -> Outcome | None:
        if call == 4:
            raise KeyboardInterrupt
        return None

    first = Runner(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sit(tmp_path, first, options())
    again = Runner()
    _, records = sit(tmp_path, again, options())
    assert again.calls == ["b", "a", "b"]
    assert [record.status for record in records] == ["ok"] * 6
    last = Runner()
    assert sit(tmp_path, last, options())[1] == records
    assert last.calls == []


@pytest.mark.parametrize(
    "changed",
    [
        options(engines=(replace(A, settings={"dtype": "y"}),)),
        options(engines=(replace(A, env={"THREADS": "1"}),)),
        options((replace(BATCH, output_tokens=2),), (A,)),
    ],
    ids=["settings", "environment", "workload"],
)
def test_what_changed_is_measured_anew(tmp_path: Path, changed: Options) -> None:
    sit(tmp_path, Runner(), options(engines=(A,)))
    runner = Runner()
    sit(tmp_path, runner, changed)
    assert runner.calls == ["a"] * 3


def test_a_changed_source_of_vtoken_measures_vtoken_anew_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Engine("vtoken", "vtoken", "float32")
    sit(tmp_path, Runner(), options(engines=(ours, A), rounds=1))
    monkeypatch.setattr(sitting_module, "source_hash", lambda folder: "another")
    runner = Runner()
    sit(tmp_path, runner, options(engines=(ours, A), rounds=1))
    assert runner.calls == ["vtoken"]


def test_a_failure_is_recorded_with_its_reason_and_stops_nobody(tmp_path: Path) -> None:
    def fail(engine: str, call: int) -> Outcome | None:
        return Outcome(None, "no such kernel (exit code 1)", False, 1.0, 0.0) if engine == "a" else None

    _, records = sit(tmp_path, Runner(fail), options(rounds=1))
    assert [(record.status, record.reason) for record in records] == [
        ("failed", "no such kernel (exit code 1)"),
        ("ok", None),
    ]
    runner = Runner()
    sit(tmp_path, runner, options(rounds=1))
    assert runner.calls == []
    _, records = sit(tmp_path, runner, options(rounds=1, retry=True))
    assert runner.calls == ["a"]
    assert [record.status for record in records] == ["ok", "ok"]


def test_who_ran_over_the_limit_is_not_tried_in_later_rounds(tmp_path: Path) -> None:
    def slow(engine: str, call: int) -> Outcome | None:
        return Outcome(None, "over the limit of 5 s", True, 5.0, 0.0) if engine == "a" else None

    runner = Runner(slow)
    _, records = sit(tmp_path, runner, options())
    assert runner.calls == ["a", "b", "b", "b"]
    assert [record.status for record in records if record.engine == "a"] == ["timeout", "skipped", "skipped"]


def test_disturbed_cells_run_again_when_asked(tmp_path: Path) -> None:
    class Disturbed(Runner):
        def __call__(self, engine: Engine, spec: Spec, folder: Path, timeout_s: float) -> Outcome:
            super().__call__(engine, spec, folder, timeout_s)
            return answer(spec, others=0.4 if len(self.calls) == 2 else 0.05)

    sit(tmp_path, Disturbed(), options(rounds=1))
    runner = Runner()
    sit(tmp_path, runner, options(rounds=1, max_others=0.5))
    assert runner.calls == []
    sit(tmp_path, runner, options(rounds=1, max_others=0.1))
    assert runner.calls == ["b"]


def test_the_slower_peer_just_keeps_up_with_the_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sitting_module, "RATE_ENGINES", ("a", "b"))

    class Speeds(Runner):
        def __call__(self, engine: Engine, spec: Spec, folder: Path, timeout_s: float) -> Outcome:
            super().__call__(engine, spec, folder, timeout_s)
            return answer(spec, seconds={"a": 2.0, "b": 8.0, "info": 99.0}[engine.name])

    runner = Speeds()
    sitting, records = sit(tmp_path, runner, options((ARRIVALS,), (A, INFO, B), rounds=2))
    assert runner.calls == ["a", "b", "a", "info", "b", "a", "b"]  # the capacities of a and b first
    assert [request.arrival_s for request in runner.specs[0].runs[0]] == [0.0] * 4
    assert sitting.rate() == pytest.approx(0.9 * 4 / 8.0)
    arrivals = [request.arrival_s for request in runner.specs[2].runs[0]]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(3 / sitting.rate())
    assert {record.workload for record in records} == {"W5"}
    again = Speeds()
    sit(tmp_path, again, options((ARRIVALS,), (A, INFO, B), rounds=2))
    assert again.calls == []


def test_a_rate_may_be_given_and_must_come_from_somewhere(tmp_path: Path) -> None:
    sitting, _ = sit(tmp_path, Runner(), options((ARRIVALS,), rate=2.0))
    assert sitting.rate() == 2.0
    runner = Runner()
    with pytest.raises(ValueError, match="run one of them, or give --rate"):
        sit(tmp_path, runner, options((BATCH, ARRIVALS)))
    assert runner.calls == []  # said before hours were spent


def test_a_rate_that_could_not_be_measured_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sitting_module, "RATE_ENGINES", ("a",))
    failure = Outcome(None, "no", False, 1.0, 0.0)
    with pytest.raises(ValueError, match="could not be measured"):
        sit(tmp_path, Runner(lambda engine, call: failure), options((ARRIVALS,)))
    sitting, _ = sit(tmp_path, Runner(), options((ARRIVALS,), retry=True))
    assert sitting.known_rate() == sitting.rate()


def test_what_earlier_calls_measured_is_known_and_one_sitting_has_one_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sitting_module, "RATE_ENGINES", ("a", "b"))
    sit(tmp_path, Runner(), options(engines=(A,), rounds=2))
    sit(tmp_path, Runner(), options((LATENCY, ARRIVALS), (B,), rounds=1))
    runner = Runner()
    sitting, _ = sit(tmp_path, runner, options((BATCH,), (INFO,), rounds=1))
    known = sitting.known((BATCH, LATENCY, ARRIVALS), (A, B, INFO))
    cells = [(each.workload, each.engine, each.round) for each in known]
    assert cells == [("W1", "a", 0), ("W1", "info", 0), ("W1", "a", 1), ("W3", "b", 0), ("W5", "b", 0)]
    rate = sitting.known_rate()
    # That of b alone: a, which comes later, is measured against it and does not change it.
    sitting, _ = sit(tmp_path, runner, options((ARRIVALS,), (A, B), rounds=1))
    assert sitting.rate() == rate
    assert runner.calls == ["info", "a"]
    assert Sitting(tmp_path, options(engines=(A,), rate=9.0), Path("model")).known_rate() == 9.0


def record(**changes: Any) -> Record:
    return replace(Record("W1", "a", 0, "print", "ok", "2026-01-01T00:00:00", figures={"seconds": 1.0}), **changes)


def test_records_come_back_and_the_later_of_a_cell_counts(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    file.add(record(status="failed", figures=None, reason="x"))
    file.add(record(engine="b", outputs=[[1, 2]]))
    file.add(record())
    again = RecordFile(path)
    assert again.get("W1", "a", 0, "print") == record()
    assert again.get("W1", "b", 0, "print") == record(engine="b", outputs=[[1, 2]])
    assert again.get("W1", "a", 0, "other") is None


def test_a_line_that_was_cut_off_is_a_cell_that_was_not_done(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    file.add(record())
    file.add(record(engine="b"))
    path.write_text(path.read_text()[:-20])
    mended = RecordFile(path)
    assert mended.get("W1", "a", 0, "print") == record()
    assert mended.get("W1", "b", 0, "print") is None
    mended.add(record(engine="c"))
    assert RecordFile(path).get("W1", "c", 0, "print") == record(engine="c")


def test_fingerprints_tell_settings_and_sources_apart(tmp_path: Path) -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
    (tmp_path / "kernel.cpp").write_text("int x;")
    before = source_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("not source")
    assert source_hash(tmp_path) == before
    (tmp_path / "kernel.cpp").write_text("int y;")
    assert source_hash(tmp_path) != before
