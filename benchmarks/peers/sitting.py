"""One sitting: which cells, in which order, and what each of them gave."""

from __future__ import annotations

import datetime
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import environments, prompts, trace
from benchmarks.peers.cell import ROOT, Outcome, run_cell
from benchmarks.peers.engines import Engine
from benchmarks.peers.figures import Goal, arrival_figures, offline_figures
from benchmarks.peers.machine import cpu_info, num_threads
from benchmarks.peers.records import Record, RecordFile, fingerprint, source_hash
from benchmarks.peers.workloads import MAX_MODEL_LEN, MAX_NUM_SEQS, WARM_UP, Request, Spec, Workload

SEED: Final = 7
CAPACITY: Final = "W5-capacity"  # W5's requests all at once: how many a second an engine can do
RATE_ENGINES: Final = ("vllm-eager", "llama-f32")  # the peers whose slower one sets W5's rate
RATE_SHARE: Final = 0.9  # of its capacity: it just keeps up

Runner = Callable[[Engine, Spec, Path, float], Outcome]


def say(line: str) -> None:
    """To the screen, at once."""
    print(line, flush=True)


@dataclass(frozen=True)
class Options:
    """What the command line says. `info_rounds`: for engines that are there for information only."""

    workloads: Sequence[Workload]
    engines: Sequence[Engine]
    rounds: int
    info_rounds: int
    timeout_s: float
    goal: Goal
    rate: float | None = None  # requests a second in W5; None: from the capacity of RATE_ENGINES
    retry: bool = False  # cells that failed before
    max_others: float | None = None  # cells in which other processes took more of the CPU than this are run again


@dataclass(frozen=True)
class Cell:
    workload: Workload
    engine: Engine
    round: int


def order(options: Options) -> Iterator[Cell]:
    """Workload by workload, round by round, engine by engine: A B C, A B C, A B C."""
    for workload in options.workloads:
        for round_ in range(options.rounds):
            for engine in options.engines:
                if round_ < (options.info_rounds if engine.information else options.rounds):
                    yield Cell(workload, engine, round_)


class Sitting:
    """Runs cells that have no record yet, and remembers all of them in `folder`."""

    def __init__(
        self,
        folder: Path,
        options: Options,
        model: Path,
        runner: Runner = run_cell,
        progress: Callable[[str], None] = say,
    ) -> None:
        self.folder = folder
        self.options = options
        self.records = RecordFile(folder / "records.jsonl")
        self._rate_file = folder / "rate"  # of W5
        self.sources: dict[str, str] = {}  # workload name -> where its prompts are from
        self._model = model
        self._runner = runner
        self._progress = progress
        self._corpus: tuple[list[int], str] | None = None
        self._runs: dict[str, list[list[Request]]] = {}
        self._vtoken = source_hash(ROOT / "src" / "vtoken")

    def run(self) -> list[Record]:
        """Run what is missing; all records that belong to these options, in order.

        Raises ValueError, before anything runs, if W5 is asked for and nobody is there to find its rate with.
        """
        cells = list(order(self.options))
        wants_rate = any(cell.workload.kind == "arrivals" for cell in cells) and self.known_rate() is None
        if wants_rate and not any(engine.name in RATE_ENGINES for engine in self.options.engines):
            raise ValueError(
                f"W5's rate is measured with {' and '.join(RATE_ENGINES)}; run one of them, or give --rate"
            )
        found: list[Record] = []
        for number, cell in enumerate(cells, 1):
            rate = self.rate() if cell.workload.kind == "arrivals" else math.inf
            label = f"[{number}/{len(cells)}] {cell.workload.name} {cell.engine.name} round {cell.round + 1}"
            found.append(self._record_of(cell, cell.workload.name, rate, label))
        return found

    def known(self, workloads: Sequence[Workload], engines: Sequence[Engine]) -> list[Record]:
        """What has been measured of these so far, by this call or an earlier one, with settings that still hold."""
        found: list[Record] = []
        for workload in workloads:
            rate = self.known_rate() if workload.kind == "arrivals" else math.inf
            if rate is None:
                continue
            runs = self._requests(workload, rate)
            for round_ in range(self.records.num_rounds):
                for engine in engines:
                    mark = self._fingerprint(Cell(workload, engine, round_), runs)
                    record = self.records.get(workload.name, engine.name, round_, mark)
                    found += [] if record is None else [record]
        return found

    def known_rate(self) -> float | None:
        """W5's requests a second if they are given or were found out before: one sitting has one rate."""
        if self.options.rate is not None:
            return self.options.rate
        return float(self._rate_file.read_text()) if self._rate_file.is_file() else None

    def rate(self) -> float:
        """W5's requests a second, measured if need be. Raises ValueError if that failed."""
        known = self.known_rate()
        if known is not None:
            return known
        workload = next(workload for workload in self.options.workloads if workload.kind == "arrivals")
        capacities = []
        for engine in self.options.engines:
            if engine.name in RATE_ENGINES:
                record = self._record_of(Cell(workload, engine, 0), CAPACITY, math.inf, f"{CAPACITY} {engine.name}")
                if record.figures is not None:
                    capacities.append(record.figures["requests_s"])
        if not capacities:
            raise ValueError("W5's rate could not be measured, see above; mend that and use --retry, or give --rate")
        rate = round(RATE_SHARE * min(capacities), 3)
        self._progress(f"W5 runs at {rate} requests a second from now on ({self._rate_file})")
        self._rate_file.write_text(str(rate))
        return rate

    def _record_of(self, cell: Cell, name: str, rate: float, label: str) -> Record:
        runs = self._requests(cell.workload, rate)
        mark = self._fingerprint(cell, runs)
        record = self.records.get(name, cell.engine.name, cell.round, mark)
        if record is not None and not self._runs_again(record):
            return record
        earlier = [self.records.get(name, cell.engine.name, i, mark) for i in range(cell.round)]
        if any(each is not None and each.status == "timeout" for each in earlier):
            record = self._make_record(cell, name, mark, "skipped", reason="over the time limit in an earlier round")
        else:
            self._progress(f"{label} ...")
            record = self._measure(cell, name, runs, mark)
            self._progress(f"{label}: {_summary(record)}")
        self.records.add(record)
        return record

    def _runs_again(self, record: Record) -> bool:
        if record.status != "ok":
            return self.options.retry
        limit = self.options.max_others
        return limit is not None and record.others_share is not None and record.others_share > limit

    def _measure(self, cell: Cell, name: str, runs: list[list[Request]], mark: str) -> Record:
        warm_up = Request(self._source(1 + SEED).batch([WARM_UP[0]])[0], WARM_UP[1])
        spec = Spec(
            kind=cell.workload.kind,
            runs=runs,
            warm_up=warm_up,
            model=str(self._model),
            settings=cell.engine.settings,
            peers_dir=str(environments.peers_dir()),
            threads=num_threads(),
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
        )
        folder = self.folder / "cells" / f"{name}.{cell.engine.name}.{cell.round}"
        shutil.rmtree(folder, ignore_errors=True)
        outcome = self._runner(cell.engine, spec, folder, self.options.timeout_s)
        shares: dict[str, Any] = {"wall_s": outcome.wall_s, "others_share": outcome.others_share}
        if outcome.result is None:
            status = "timeout" if outcome.timed_out else "failed"
            return self._make_record(cell, name, mark, status, reason=outcome.reason, **shares)
        result = outcome.result
        outputs = None
        if cell.workload.kind == "arrivals":
            figures = arrival_figures(runs[0], result["token_times"], self.options.goal)
        else:
            figures = offline_figures(runs, result["runs"])
            answers = [run.get("outputs") for run in result["runs"]]
            outputs = [answer[0] for answer in answers] if all(answers) else None
        shares |= {"startup_s": result["startup_s"], "version": result.get("version")}
        return self._make_record(cell, name, mark, "ok", figures=figures, outputs=outputs, **shares)

    def _make_record(self, cell: Cell, name: str, mark: str, status: Any, **more: Any) -> Record:
        at = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        return Record(name, cell.engine.name, cell.round, mark, status, at, **more)

    def _fingerprint(self, cell: Cell, runs: list[list[Request]]) -> str:
        version = self._vtoken if cell.engine.family == "vtoken" else cell.engine.family
        requests = [[asdict(request) for request in run] for run in runs]
        goal = asdict(self.options.goal) if cell.workload.kind == "arrivals" else None
        recipe = [step.recipe for step in environments.steps() if cell.engine.family in step.families]
        parts = (cell.engine.to_json(), requests, version, recipe, goal, cpu_info(), num_threads())
        return fingerprint(*parts)

    def _source(self, seed: int) -> prompts.PromptSource:
        if self._corpus is None:
            self._corpus = prompts.corpus(self._model)
        return prompts.PromptSource(self._corpus[0], seed)

    def _requests(self, workload: Workload, rate: float) -> list[list[Request]]:
        """The requests of every run: the same for all engines and rounds."""
        known = f"{workload.name} at {rate}"
        if known not in self._runs:
            source = self._source(SEED)
            assert self._corpus is not None
            self.sources[workload.name] = self._corpus[1]
            if workload.kind == "arrivals":
                entries, origin = trace.load_trace(workload.num_requests)
                self.sources[workload.name] += f"; lengths of {origin}"
                texts = source.batch([entry.prompt_tokens for entry in entries])
                arrivals = trace.rescale(entries, rate)
                self._runs[known] = [
                    [
                        Request(text, entry.output_tokens, arrival)
                        for text, entry, arrival in zip(texts, entries, arrivals, strict=True)
                    ]
                ]
            else:
                lengths = [workload.prompt_tokens] * workload.num_requests
                self._runs[known] = [
                    [Request(text, workload.output_tokens) for text in source.batch(lengths)]
                    for _ in range(workload.repeats)
                ]
        return self._runs[known]


def _summary(record: Record) -> str:
    """One line about a cell for the screen."""
    if record.figures is None:
        return f"{record.status}, {record.reason}"
    seconds, rate = record.figures["seconds"], record.figures["output_tok_s"]
    others = f", others took {record.others_share:.0%} of the CPU" if (record.others_share or 0) > 0.1 else ""
    return f"{seconds:.2f} s, {rate:.1f} tokens/s{others}"
