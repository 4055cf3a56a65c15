"""`ReclaimBench`: the matrix of settings, all arms in each, and what is measured beside it.

1. The matrix: policies x ratios x block sizes x workloads x arms, each run in a pool too small for its jobs.
2. The sweeps: limits on the requests that run at once, for the most that goes without a preemption, the knee, and the
   throughput within the SLA. For the first policy and block size, and the larger ratios.
3. Two probes: steady decode at a fixed budget, and a pool that stays half empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

import vtoken
from vtoken.bench import knee
from vtoken.bench.arms import Run, run_arm, run_in_turns
from vtoken.bench.config import POOL_REQUESTS, BenchConfig, pool_for
from vtoken.bench.jobs import Job, Workload, shaped
from vtoken.bench.machine import machine
from vtoken.bench.metrics import reduction
from vtoken.bench.pictures import picture
from vtoken.bench.report import (
    Cell,
    Comparison,
    OverheadProbe,
    Report,
    RunReport,
    SteadyProbe,
    Sweep,
    WorkloadReport,
)
from vtoken.bench.stages import Arm, Setting
from vtoken.bench.targets import LARGEST_REDUCTION, SLA, evaluate

SWEPT_RATIOS: Final = 2  # the largest of those asked for
FEWEST_SWEPT: Final = 4  # requests at once
MOST_SWEPT: Final = 32
BEYOND_RATIO: Final = 0.75  # erases enough for the largest published reduction
NATIVE: Final = "none"  # policy of the native arm

_OVERHEAD_ROUNDS: Final = 3


class Progress(Protocol):
    """What a progress bar offers; tqdm does."""

    def update(self, n: int = 1) -> object: ...

    def set_postfix_str(self, text: str, refresh: bool = True) -> object: ...


ProgressBar = Callable[[int], AbstractContextManager[Progress]]


class _Silent:
    def update(self, n: int = 1) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...


class ReclaimBench:
    """Runs a benchmark once: `ReclaimBench(config).run()`."""

    def __init__(self, config: BenchConfig, bar: ProgressBar = lambda total: nullcontext(_Silent())) -> None:
        config.check()
        self.config = config
        self._bar = bar
        self._progress: Progress = _Silent()
        self._runs: list[RunReport] = []
        self._comparisons: list[Comparison] = []
        self._native: dict[tuple[str, int, int], Run] = {}  # workload, block size and blocks -> its run

    def run(self) -> Report:
        """Raises EngineError if a request of a run fails, ConfigError or RequestError for what cannot run."""
        config = self.config
        created = datetime.now(UTC).isoformat(timespec="seconds")
        cells = list(self._cells())
        with self._bar(len(cells)) as self._progress:
            pictures = [one for cell in cells if (one := self._measure(cell)) is not None]
            sweeps = [sweep for cell in self._swept(cells) for sweep in self._sweep(cell)] if config.sweeps else []
            steady = self._steady() if config.probes and "vtoken" in config.arms else None
            overhead = self._overhead() if config.probes and {"native", "vtoken"} <= {*config.arms} else None
        report = Report(
            vtoken=vtoken.__version__,
            created=created,
            machine=machine(),
            settings=config.place.about | config.settings,
            workloads=[_describe(workload) for workload in config.workloads],
            runs=[replace(run, throughput_within=self._within(run, sweeps)) for run in self._runs],
            comparisons=self._comparisons,
            sweeps=sweeps,
            steady=steady,
            overhead=overhead,
            pictures=pictures,
        )
        return replace(report, targets=evaluate(report))

    # --- the matrix -----------------------------------------------------------------------------------------------

    def _cells(self) -> Iterator[Cell]:
        config = self.config
        for workload in config.workloads:
            for size in config.block_sizes:
                num_blocks = config.num_blocks or pool_for(workload, size)
                for name in config.policies:
                    for ratio in config.ratios:
                        yield Cell(workload.name, name, ratio, size, num_blocks)
        # The largest published reduction needs more than 70 % erased, and texts so long that a block is little.
        longest = max(config.workloads, key=lambda workload: workload.mean_prompt + workload.mean_output)
        scattered = next((name for name in config.policies if name.partition(":")[0] == "random"), None)
        if scattered is not None and max(config.ratios) < LARGEST_REDUCTION and len(config.ratios) > 1:
            size = min(config.block_sizes)
            yield Cell(longest.name, scattered, BEYOND_RATIO, size, config.num_blocks or pool_for(longest, size))

    def _measure(self, cell: Cell) -> Any:
        """Run all arms of a cell. Returns its picture, for the first cell of each workload."""
        runs: dict[str, Run] = {}
        for arm in self.config.arms:
            run = runs[arm] = self._run(cell, arm, pictures=arm in ("repack", "vtoken"))
            is_new = arm != "native" or not any(
                r.arm == "native" and _place(r.cell) == _place(cell) for r in self._runs
            )
            if is_new:
                named = replace(cell, policy=NATIVE, ratio=0.0) if arm == "native" else cell
                self._runs.append(RunReport(named, arm, run.metrics, run.num_spared))
        naive = runs.get("naive")
        for arm in ("repack", "vtoken"):
            if naive is not None and arm in runs:
                self._comparisons.append(_compare(cell, arm, runs[arm], naive))
        self._progress.update()
        is_shown = cell == self._shown(cell.workload)
        return picture(cell, runs) if is_shown else None

    def _shown(self, workload: str) -> Cell:
        """The cell that stands for its workload in pictures: first policy, middle ratio, first block size."""
        ratios = sorted(self.config.ratios)
        middle, first = ratios[len(ratios) // 2], next(iter(self.config.policies))
        return next(c for c in self._cells() if (c.workload, c.policy, c.ratio) == (workload, first, middle))

    def _run(self, cell: Cell, arm: Arm, *, pictures: bool = False) -> Run:
        """One arm with no limit on the requests at once, until every job has its answer."""
        place = _place(cell)
        if arm == "native" and place in self._native:
            return self._native[place]
        self._progress.set_postfix_str(f"{cell}: {arm}")
        workload = self._workload(cell.workload)
        run = run_arm(
            self._setting(cell, arm),
            workload.jobs,
            self.config.place.start,
            seed=self.config.seed,
            refill=self.config.refill and workload.is_at_once,
            pictures=pictures,
        )
        if arm == "native":
            self._native[place] = run
        return run

    def _point(self, cell: Cell, arm: Arm, limit: int) -> knee.Point:
        """One arm with at most `limit` requests at once, all there from the start, until every job has its answer."""
        self._progress.set_postfix_str(f"{cell}: {arm}, at most {limit} at once")
        metrics = run_arm(
            replace(self._setting(cell, arm), max_num_seqs=limit),
            shaped(self._workload(cell.workload).jobs, at_once=True),
            self.config.place.start,
            seed=self.config.seed,
            refill=True,
        ).metrics
        return knee.Point(
            limit,
            metrics.peak_running,
            metrics.throughput,
            metrics.decode_p50,
            metrics.decode_p95,
            metrics.preemptions,
        )

    def _setting(self, cell: Cell, arm: Arm) -> Setting:
        is_native = arm == "native"
        return Setting(
            arm=arm,
            policy=None if is_native else self.config.policies[cell.policy],
            budget=None if is_native else 1 - cell.ratio,
            block_size=cell.block_size,
            num_blocks=cell.num_blocks,
            max_model_len=self._workload(cell.workload).longest,
            copies=self.config.copies,
        )

    def _workload(self, name: str) -> Workload:
        return next(workload for workload in self.config.workloads if workload.name == name)

    def _within(self, run: RunReport, sweeps: list[Sweep]) -> float | None:
        """A run's throughput within the SLA, see `RunReport`."""
        native = self._native.get(_place(run.cell))
        if native is None:
            return None
        for sweep in sweeps:
            is_its = _place(sweep.cell) == _place(run.cell) if run.arm == "native" else sweep.cell == run.cell
            if sweep.arm == run.arm and is_its:
                return sweep.throughput_within
        keeps = run.metrics.decode_p95 <= SLA * native.metrics.decode_p95
        return run.metrics.throughput if keeps else 0.0

    # --- sweeps ---------------------------------------------------------------------------------------------------

    def _swept(self, cells: list[Cell]) -> list[Cell]:
        policy, size = next(iter(self.config.policies)), self.config.block_sizes[0]
        ratios = sorted(self.config.ratios)[-SWEPT_RATIOS:]
        return [c for c in cells if c.policy == policy and c.block_size == size and c.ratio in ratios]

    def _sweep(self, cell: Cell) -> list[Sweep]:
        native = self._run(cell, "native") if "native" in self.config.arms else None
        p95_limit = SLA * native.metrics.decode_p95 if native is not None else 0.0
        return [self._sweep_arm(cell, arm, p95_limit) for arm in self.config.arms]

    def _sweep_arm(self, cell: Cell, arm: Arm, p95_limit: float) -> Sweep:
        points: dict[int, knee.Point] = {}

        def at(limit: int) -> knee.Point:
            if limit not in points:
                points[limit] = self._point(cell, arm, limit)
            return points[limit]

        # With few at once a run takes longest and tells least; bisection goes there where it has to.
        limits = [limit for limit in knee.limits_up_to(MOST_SWEPT) if limit >= FEWEST_SWEPT]
        for limit in limits[:: 2 if self.config.is_coarse else 1]:
            if at(limit).peak_running < limit:
                break  # the pool holds no more: larger limits change nothing
        sustained = knee.most_sustained(at, MOST_SWEPT, points.values())
        ordered = sorted(points.values(), key=lambda point: point.limit)
        best = knee.find_knee(ordered)
        return Sweep(cell, arm, ordered, sustained, best.limit, p95_limit, knee.throughput_within(ordered, p95_limit))

    # --- probes ---------------------------------------------------------------------------------------------------

    def _steady(self) -> SteadyProbe:
        """Requests of one length that decode at a budget in tokens, in a pool with a block to spare for each."""
        self._progress.set_postfix_str("steady decode at a fixed budget")
        name, policy = next(iter(self.config.policies.items()))
        size, num_requests = self.config.block_sizes[0], 8
        budget = max(8 * size, 2 * policy.window, 2 * policy.sinks)
        prompt = 2 * budget
        stride = policy.stride or max(size, policy.window)
        peak = -(-(budget + stride) // size) + 1  # blocks of a request after its prompt
        num_blocks = (num_requests - 1) * peak + -(-prompt // size) + 1
        longest = prompt + 6 * budget
        setting = Setting("vtoken", policy, budget, size, num_blocks, longest, copies=self.config.copies)
        jobs = [Job(0.0, prompt, 6 * budget)] * num_requests
        run = run_arm(setting, jobs, self.config.place.start, seed=self.config.seed)
        steps = run.recording.steps
        # Steady from the first decision on: until then what the prompts left behind may still be packed.
        decode = np.flatnonzero(steps["is_decode"] & (steps["running"] == num_requests))[stride:]
        copied = int(steps["relocated"][decode].sum())
        evicted = int(steps["evicted"][decode[-1]] - steps["evicted"][decode[0]]) if len(decode) else 0
        token_bytes = run.metrics.bytes_copied // max(1, run.metrics.tokens_copied)
        return SteadyProbe(name, budget, num_blocks, len(decode), evicted, copied, copied * token_bytes)

    def _overhead(self) -> OverheadProbe:
        """Native and vtoken step by step in turns, in a pool of twice the blocks that the jobs ever hold at once."""
        name, policy = next(iter(self.config.policies.items()))
        workload, size = self.config.workloads[0], self.config.block_sizes[0]
        jobs = shaped(workload.jobs[: 2 * POOL_REQUESTS], at_once=True)  # so that both arms take the same steps
        num_blocks = 2 * sum(-(-job.num_tokens // size) for job in jobs)
        longest = max(job.num_tokens for job in jobs)
        native = Setting("native", None, None, size, num_blocks, longest)
        ratio = sorted(self.config.ratios)[len(self.config.ratios) // 2]
        ready = replace(native, arm="vtoken", policy=policy, budget=1 - ratio, trigger="pressure")
        pairs = []
        for i in range(_OVERHEAD_ROUNDS):
            self._progress.set_postfix_str(
                f"overhead with the pool half empty, round {i + 1} of {_OVERHEAD_ROUNDS}: native and vtoken in turns"
            )
            order = (native, ready) if i % 2 == 0 else (ready, native)  # whoever comes second finds other caches
            runs = {
                run.setting.arm: run
                for run in run_in_turns(order, jobs, self.config.place.start, seed=self.config.seed)
            }
            pairs.append(_paired_steps(runs["native"], runs["vtoken"]))
        metrics = runs["vtoken"].metrics
        rounds = [float(np.median(pair["vtoken"] / pair["native"])) - 1 for pair in pairs]
        all_pairs = {what: np.concatenate([pair[what] for pair in pairs]) for what in pairs[0]}
        more = float(np.median(all_pairs["vtoken"] - all_pairs["native"]))
        return OverheadProbe(
            policy=name,
            num_blocks=num_blocks,
            peak_held_blocks=metrics.peak_held_blocks,
            tokens_evicted=metrics.tokens_erased,
            reclaim_plans=metrics.reclaim_plans,
            native_step_seconds=float(np.median(all_pairs["native"])),
            vtoken_step_seconds=float(np.median(all_pairs["vtoken"])),
            overhead=float(np.median(rounds)),
            host_share=min(1.0, max(0.0, float(np.median(all_pairs["host"])) / more)) if more > 0 else 0.0,
            rounds=rounds,
        )


def _paired_steps(native: Run, vtoken: Run) -> dict[str, NDArray[np.float64]]:
    """Seconds of the decode steps of two runs that took the same steps, and how much more vtoken's host took."""
    both = [
        run.recording.steps[: min(len(native.recording.steps), len(vtoken.recording.steps))] for run in (native, vtoken)
    ]
    is_decode = both[0]["is_decode"] & both[1]["is_decode"]
    host, device = (
        [(steps[one] + steps[other])[is_decode] for steps in both]
        for one, other in (("planning", "applying"), ("forward", "copies"))
    )
    return {"native": host[0] + device[0], "vtoken": host[1] + device[1], "host": host[1] - host[0]}


def _describe(workload: Workload) -> WorkloadReport:
    return WorkloadReport(
        workload.name,
        workload.about,
        len(workload.jobs),
        workload.mean_prompt,
        workload.mean_output,
        workload.longest,
    )


def _compare(cell: Cell, arm: str, run: Run, naive: Run) -> Comparison:
    found = reduction(run.recording, naive.recording)
    return Comparison(
        cell=cell,
        arm=arm,
        has_same_victims=run.metrics.victims == naive.metrics.victims,
        places=found.places,
        retained_blocks=found.retained,
        naive_retained_blocks=found.other_retained,
        floor_blocks=found.floor,
        reduction=found.share,
        possible=found.possible,
        ceiling=found.ceiling,
    )


def _place(cell: Cell) -> tuple[str, int, int]:
    return cell.workload, cell.block_size, cell.num_blocks
