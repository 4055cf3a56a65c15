"""One run of one arm: jobs in, a recording and its figures out.

The arms are the engine's `kv_mode`s. With `trigger="always"` tokens die at fixed places of their text, so the three
that evict have the same victims, which `RunMetrics.victims` shows:

- **native** evicts nothing;
- **naive** evicts logically: dead cells stay empty, nothing is moved, only a block in which nothing lives returns;
- **repack** moves tokens together when the pool runs low and a quarter of its cells is dead, and reuses no cell (the
  published method);
- **vtoken** reuses dead cells first and moves tokens only where that brings back a block that is missing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from vtoken.base.errors import ConfigError, EngineError
from vtoken.base.sampling_params import SamplingParams
from vtoken.bench.jobs import Job
from vtoken.bench.metrics import RunMetrics, Totals, summarize, victim_hash
from vtoken.bench.recorder import Recorder, Recording
from vtoken.bench.stages import Arm, Setting, Stage
from vtoken.policies.base import Policy
from vtoken.schedule.scheduler import Scheduler

ARMS: Final[tuple[Arm, ...]] = get_args(Arm)
FEWEST_WAITING: Final = 4  # requests in the queue, where it is refilled
WARM_UP: Final = 0.25  # share of the answer tokens that are left out of the throughput, where the queue is refilled


@dataclass(frozen=True)
class Run:
    """One arm's run, finished."""

    setting: Setting
    metrics: RunMetrics
    recording: Recording
    num_spared: int  # jobs whose text is too short for the policy to take anything from


def run_arm(
    setting: Setting,
    jobs: Sequence[Job],
    start: Callable[[Setting], Stage],
    *,
    seed: int,
    refill: bool = False,
    pictures: bool = False,
) -> Run:
    """Run jobs, in the order of their arrival, until all have their answers.

    Args:
        start: makes the engine that the setting describes.
        seed: of the prompts that jobs do not bring themselves.
        refill: let the jobs in again, with other prompts, whenever few wait, until those of the first round have their
            answers: so that the last ones do not run alone, and memory stays short.
        pictures: keep a map of the pool before and after its largest reclaim.

    Raises EngineError if a request ends with an error, ConfigError or RequestError for what could never run.
    """
    return _finish(_drive(setting, jobs, start, seed=seed, refill=refill, pictures=pictures))


def run_in_turns(
    settings: Sequence[Setting], jobs: Sequence[Job], start: Callable[[Setting], Stage], *, seed: int
) -> list[Run]:
    """The same as `run_arm` for each setting, but a step of one, a step of the next, and so on: a busy moment of the
    machine meets them all. Steps are timed each by itself; the runs' own clocks go on while the others have their turn.
    """
    drives = [_drive(setting, jobs, start, seed=seed, refill=False, pictures=False) for setting in settings]
    runs: dict[int, Run] = {}
    try:
        while len(runs) < len(drives):
            for i, drive in enumerate(drives):
                if i not in runs:
                    try:
                        next(drive)
                    except StopIteration as end:
                        runs[i] = end.value
    finally:
        for drive in drives:
            drive.close()
    return [runs[i] for i in range(len(drives))]


def _finish(drive: Generator[None, None, Run]) -> Run:
    while True:
        try:
            next(drive)
        except StopIteration as end:
            run: Run = end.value
            return run


def _drive(
    setting: Setting,
    jobs: Sequence[Job],
    start: Callable[[Setting], Stage],
    *,
    seed: int,
    refill: bool,
    pictures: bool,
) -> Generator[None, None, Run]:
    """Stops after every step."""
    stage = start(setting)
    try:
        scheduler = stage.scheduler
        recorder = Recorder(scheduler, pictures=pictures)
        deaths: dict[int, dict[int, int]] = {}  # of the first round
        begin = stage.now()
        coming = deque(enumerate(jobs))
        num_spared = 0
        while len(deaths) < len(jobs):
            if refill and not coming and scheduler.num_waiting < FEWEST_WAITING:
                number = recorder.num_requests
                coming.append((number, replace(jobs[number % len(jobs)], arrival=0.0, prompt_token_ids=None)))
            while coming and begin + coming[0][1].arrival <= stage.now():
                index, job = coming.popleft()
                params, is_spared = _params(setting, job)
                scheduler.add(str(index), job.token_ids(index, seed, stage.vocab_size), params, seed=seed + index)
                recorder.num_requests += 1
                num_spared += is_spared
            if not scheduler.num_unfinished:
                stage.wait_until(begin + coming[0][1].arrival)
                continue
            _step(stage, recorder, begin)
            yield
            for request in scheduler.take_finished():
                if request.error is not None:
                    raise EngineError(f"arm {setting.arm}: request {request.request_id} failed: {request.error}")
                if request.index < len(jobs):
                    deaths[request.index] = request.sequences[0].died_at
        recording = recorder.recording()
        warm_up = WARM_UP if refill else 0.0
        metrics = summarize(recording, _totals(scheduler, deaths), stage.bytes_per_token, warm_up)
        return Run(setting, metrics, recording, num_spared)
    finally:
        stage.close()


def _step(stage: Stage, recorder: Recorder, begin: float) -> None:
    scheduler = stage.scheduler
    recorder.before()
    started = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    if plan is None:
        raise EngineError(f"nothing can run, but {scheduler.num_unfinished} requests are left: a bug of ours")
    recorder.planned(plan, planned - started)
    result, seconds = stage.execute(plan)
    executed = time.perf_counter()
    drawn = scheduler.apply(result)
    applied = time.perf_counter() - executed
    recorder.applied(drawn, stage.now() - begin, seconds, applied, counts_host=stage.counts_host)


def _params(setting: Setting, job: Job) -> tuple[SamplingParams, bool]:
    """(how a job is drawn, whether its budget is all of its text): the prompt may be too short for any eviction."""
    params = SamplingParams(temperature=0.0, max_tokens=job.num_output_tokens, ignore_eos=True)
    if setting.policy is None or setting.budget is None or evicts(setting.policy, setting.budget, job):
        return params, False
    return params.replace(kv_budget=job.num_tokens), True


def evicts(policy: Policy, budget: int | float, job: Job) -> bool:
    """Whether a policy can keep to a budget in a job's prompt: more than what it protects has to fit."""
    num_kept = int(budget * job.num_prompt_tokens) if isinstance(budget, float) else budget
    try:
        policy.check_budget(num_kept)
    except ConfigError:
        return False
    return True


def _totals(scheduler: Scheduler, deaths: dict[int, dict[int, int]]) -> Totals:
    counters, memory = scheduler.counters, scheduler.memory
    return Totals(
        tokens_generated=counters.tokens_generated,
        tokens_computed=counters.tokens_computed,
        tokens_erased=sum(len(died_at) for died_at in deaths.values()),  # deaths that a recompute replays count once
        blocks_returned=memory.counters.blocks_reclaimed,
        blocks_returned_dead=memory.counters.blocks_reclaimed_dead,
        tokens_copied=memory.counters.tokens_relocated,
        reclaim_plans=memory.counters.reclaim_plans,
        preemptions=counters.preemptions,
        rungs={
            "forget": counters.forgets,
            "drain": counters.drains,
            "reclaim": counters.reclaims,
            "evict": counters.evictions,
            "preempt": counters.preemptions,
        },
        verdicts={str(verdict): count for verdict, count in memory.decisions.counts.items()},
        victims=victim_hash(deaths),
    )
