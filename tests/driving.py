"""Drives the real scheduler and books over the simulated executor, and holds every answer to a model of plain numbers.

The model (`expected_output`) knows nothing of blocks, plans or batches: one sequence, one number a token, in Python
integers. So what it says is what the answer has to be, whatever the scheduler did on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vtoken.base.clock import ManualClock
from vtoken.base.hashing import mix64
from vtoken.base.sampling_params import SamplingParams
from vtoken.executor.sim import _A, _B, SimExecutor
from vtoken.memory import bits
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.config import SchedulerConfig, SchedulerCounters
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.retention import KEEPS_ALL, RetentionSettings
from vtoken.schedule.scheduler import Scheduler
from vtoken.schedule.sequence import FinishReason, Request, Sequence

VOCAB_SIZE = 1000
_MASK = 2**64 - 1

# --- the model of plain numbers -----------------------------------------------------------------------------------


def mix(*keys: int) -> int:
    """`mix64` for single keys, in Python integers."""
    state = 0
    for key in keys:
        state = (state + 0x9E3779B97F4A7C15 & _MASK) ^ (key & _MASK)
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def tokens(count: int, *key: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """A text of `count` tokens, always the same for the same key."""
    return [mix(*key, i) % vocab_size for i in range(count)]


@dataclass(frozen=True)
class Answer:
    """What one choice has to say."""

    token_ids: list[int]
    finish_reason: FinishReason


def expected_output(
    prompt: SequenceOf[int],
    params: SamplingParams,
    *,
    seed: int,
    choice: int = 0,
    died_at: Mapping[int, int] | None = None,
    eos: Iterable[int] = (),
    vocab_size: int = VOCAB_SIZE,
) -> Answer:
    """What the simulated model answers to `prompt`, token by token, if tokens die as `died_at` (position -> length)."""
    assert params.max_tokens is not None
    dying = defaultdict(list)
    for position, length in (died_at or {}).items():
        dying[length].append(position)
    cells: dict[int, int] = {}
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    text = list(prompt)
    while True:
        position = len(cells)
        for dead in dying[position]:
            cells[dead] = 0
        readable = sum(cells.values())
        cells[position] = (int(_A) * mix(text[position], position) + int(_B) * readable) & _MASK
        if len(cells) < len(text):
            continue
        index = len(text) - len(prompt)
        stream = 0 if params.temperature < 1e-5 else mix(seed, choice, index)
        text.append(mix((readable + cells[position]) & _MASK, stream) % vocab_size)
        if text[-1] in stops:
            return Answer(text[len(prompt) :], FinishReason.STOP)
        if index + 1 == params.max_tokens:
            return Answer(text[len(prompt) :], FinishReason.LENGTH)


# --- scripts ----------------------------------------------------------------------------------------------------------

# (sequence, length) -> the positions to evict then; asked once for each length that a sequence reaches.
Evictor = Callable[[Sequence, int], SequenceOf[int]]
# (plan, the requests in it) -> what goes wrong in this step, or None.
Fault = Callable[[StepPlan, list[Request]], "StepFailure | DrawFailure | None"]


class StepFailure(RuntimeError):
    """Raised by the executor: the whole step is lost. `after`: how far it got ("nothing", "copies", "forward")."""

    def __init__(self, message: str = "planted", after: str = "nothing") -> None:
        super().__init__(message)
        self.after = after


@dataclass(frozen=True)
class DrawFailure:
    """The draws of one request fail, the rest of the step is fine."""

    request: Request
    reason: str = "the logits are not finite"


def evict_scattered(every: int, percent: int = 40, *, in_prompt: bool = False) -> Evictor:
    """Kill about `percent` of the live tokens at the prompt's end and at each `every`-th token of the answer, chosen by
    hash, so that survivors lie scattered. `in_prompt`: also wherever a chunk of the prompt ends, which depends on the
    load."""

    def positions(sequence: Sequence, length: int) -> list[int]:
        generated = length - sequence.request.num_prompt_tokens
        if generated % every if generated >= 0 else not in_prompt:
            return []
        return [p for p in range(length) if mix(sequence.request.seed, sequence.choice, length, p) % 100 < percent]

    return positions


def evict_every_other_prompt(percent: int = 60) -> Evictor:
    """Requests of even number are left with holes all over when their prompt ends; the others only grow."""
    evict = evict_scattered(10**6, percent)
    return lambda sequence, length: evict(sequence, length) if sequence.request.index % 2 == 0 else ()


def percent_scattered(died_at: Mapping[int, int]) -> float:
    """Share of deaths, in percent, at which the victim was not the oldest token still alive."""
    by_death = sorted(died_at.items(), key=lambda item: (item[1], item[0]))
    dead: set[int] = set()
    scattered = oldest = 0
    for position, _ in by_death:
        while oldest in dead:
            oldest += 1
        scattered += position != oldest
        dead.add(position)
    return 100 * scattered / max(1, len(by_death))


# --- the driver -------------------------------------------------------------------------------------------------------


@dataclass
class FaultyExecutor:
    """A SimExecutor whose steps fail when told to, and that then leaves rubbish behind, as a real one would."""

    inner: SimExecutor
    failure: StepFailure | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        if self.failure is None:
            return self.inner.execute(plan)
        failure, self.failure = self.failure, None
        if failure.after != "nothing":
            self.inner._run_copies(plan)
        if failure.after == "forward":
            self.inner.cells[plan.write_slots] = mix64(plan.write_slots, plan.step, 0xBAD)
        raise failure


@dataclass
class Driver:
    """One engine without a model: add requests, step, and everything is checked after every step.

    After each step all memory that nobody may read any more is overwritten: free blocks of both pools, dead cells,
    tail slack. So a stale read changes the output, and `check_outputs` sees it.
    """

    num_blocks: int = 64
    block_size: int = 16
    num_host_blocks: int = 0
    preemption: str = "recompute"
    enable_prefix_caching: bool = True
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 64
    max_model_len: int | None = None  # None: what the pool holds
    eos: frozenset[int] = frozenset()
    max_passes: int = 16
    costs: PreemptionCosts | None = None
    retention: RetentionSettings = KEEPS_ALL
    beside_delay: int = 0  # steps that a copy beside them takes
    kv: Mapping[str, Any] = field(default_factory=dict)  # kv_mode, on_pressure, ... of `SchedulerConfig`
    vocab_size: int = VOCAB_SIZE
    evictor: Evictor | None = None
    fault: Fault | None = None
    checks: bool = True
    requests: list[Request] = field(default_factory=list)  # all that were ever added
    finished: list[Request] = field(default_factory=list)  # in the order in which they ended
    plans: list[StepPlan] = field(default_factory=list)  # kept with `keep_plans`
    keep_plans: bool = False

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.memory = KVCacheManager(
            self.num_blocks,
            self.block_size,
            num_host_blocks=self.num_host_blocks,
            enable_prefix_caching=self.enable_prefix_caching,
            reuse_cells=self.kv.get("kv_mode", "vtoken") in ("native", "vtoken"),
        )
        config = SchedulerConfig(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len or self.num_blocks * self.block_size,
            self.preemption,
            self.eos,
            self.max_passes,
            self.retention,
            **self.kv,
        )
        self.scheduler = Scheduler(config, self.memory, self.clock, costs=self.costs)
        self.sim = SimExecutor(
            self.num_blocks, self.block_size, self.num_host_blocks, self.vocab_size, self.beside_delay
        )
        self.executor = FaultyExecutor(self.sim)
        self._deaths: dict[Sequence, dict[int, int]] = defaultdict(dict)  # as they were ordered
        self._reached: dict[Sequence, int] = defaultdict(int)  # the length up to which the evictor was asked
        self._streamed: dict[Sequence, list[int]] = defaultdict(list)  # the tokens of each step, one after the other
        self._last_counters = (0, 0, 0, 0)

    @property
    def counters(self) -> SchedulerCounters:
        return self.scheduler.counters

    def add(
        self,
        prompt: SequenceOf[int],
        max_tokens: int | None = 16,
        *,
        request_id: str | None = None,
        seed: int | None = None,
        cache_salt: str | None = None,
        **params: object,
    ) -> Request:
        """Queue a request, greedy unless `temperature` says otherwise; its seed is its number unless one is given."""
        number = len(self.requests)
        request = self.scheduler.add(
            str(number) if request_id is None else request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}),
            seed=number if seed is None else seed,
            cache_salt=cache_salt,
        )
        self.requests.append(request)
        return request

    def add_crowd(self) -> Driver:
        """Eight requests that begin alike, long and short, greedy and not, two of them with three choices.

        In 35 blocks of 4, with `evict_every_other_prompt`, everything happens: preemption, relocation, copies on write,
        prefix hits.
        """
        common = tokens(10, 99)
        for i in range(8):
            own, max_tokens = (3 + 4 * i, 6 + i) if i % 2 == 0 else (3 + i, 24 + i)
            self.add(common + tokens(own, i), max_tokens, n=3 if i % 4 == 1 else 1, temperature=float(i % 3))
        return self

    def step(self, in_flight: Callable[[], object] | None = None) -> list[tuple[Sequence, int]] | None:
        """One step; `in_flight` is called while it is under way. None when there was nothing to do."""
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.scheduler.num_unfinished == 0, "requests are left and the scheduler has nothing to do: hung"
            return None
        if self.keep_plans:
            self.plans.append(plan)
        if in_flight is not None:
            in_flight()
        ran = self._requests_of(plan)
        trouble = self.fault(plan, ran) if self.fault is not None else None
        self.executor.failure = trouble if isinstance(trouble, StepFailure) else None
        drawn: list[tuple[Sequence, int]] = []
        try:
            result = self.executor.execute(plan)
        except StepFailure as failure:
            self.scheduler.fail(failure)
        else:
            if isinstance(trouble, DrawFailure):
                result = self._fail_draws(plan, result, trouble)
            self._poison(plan.step)
            drawn = self.scheduler.apply(result)
        for sequence, token in drawn:
            self._streamed[sequence].append(token)
        self.clock.advance(1.0)
        self.finished += self.scheduler.take_finished()
        if self.checks:
            self.scheduler.check()
            self._check_counters()
        if self.evictor is not None:
            self._evict(self.evictor)
        return drawn

    def run_until(self, reached: Callable[[], bool], max_steps: int = 500) -> None:
        """Step until something is so; it is an error if that does not come."""
        for _ in range(max_steps):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached in {max_steps} steps")

    def run(self, max_steps: int = 10_000) -> Driver:
        """Step until every request has ended, then check the answers and that nothing is left in the books."""
        first = self.counters.steps
        while self.scheduler.num_unfinished:
            self.step()
            assert self.counters.steps - first <= max_steps, f"no end in sight after {max_steps} steps"
        self.check_outputs()
        self.check_idle()
        return self

    @property
    def outputs(self) -> list[list[list[int]]]:
        """Of each request, of each choice: the answer."""
        return [[sequence.output_token_ids for sequence in request.sequences] for request in self.requests]

    def deaths_of(self, sequence: Sequence) -> dict[int, int]:
        """Position -> length at which it was ordered to die. What the first choice lost before the fork, all lost."""
        if sequence.request.retention is not None:  # by policy, so the books say: the mask of the oracle
            return dict(self.scheduler.died_at(sequence))
        shared = self._deaths[sequence.request.sequences[0]].items()
        prompt = sequence.request.num_prompt_tokens
        return {p: died for p, died in shared if died < prompt} | self._deaths[sequence]

    def expect(self, sequence: Sequence) -> Answer:
        request = sequence.request
        return expected_output(
            request.prompt_token_ids,
            request.params,
            seed=request.seed,
            choice=sequence.choice,
            died_at=self.deaths_of(sequence),
            eos=self.eos,
            vocab_size=self.vocab_size,
        )

    def check_outputs(self) -> None:
        """Every answer is the model's; that of a request that was cut off is the beginning of it."""
        for request in self.requests:
            for sequence in request.sequences:
                right, given = self.expect(sequence), sequence.output_token_ids
                name = f"request {request.request_id}, choice {sequence.choice}"
                assert self._streamed[sequence] == given, f"{name}: what was streamed is not what was answered"
                if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    assert given == right.token_ids, f"{name}: the answer is not the model's"
                    assert sequence.finish_reason is right.finish_reason, name
                else:
                    assert given == right.token_ids[: len(given)], f"{name}: the part answer is not the model's"
                if sequence.is_finished and given:
                    assert sequence.died_at == self.deaths_of(sequence), f"{name}: deaths are not as ordered"

    def check_idle(self) -> None:
        """Nothing runs, and nothing is held but what the prefix cache keeps."""
        while self.memory.moves:  # copies beside the steps end some time
            self.step()
        usage, scheduler = self.memory.usage(), self.scheduler
        self.finished += scheduler.take_finished()
        assert scheduler.num_unfinished == scheduler.num_waiting == scheduler.num_preempted == 0
        assert not scheduler.running
        assert usage.held_blocks == usage.live_tokens == usage.pinned_blocks == 0
        assert usage.free_blocks + usage.cached_blocks == self.num_blocks
        assert self.memory.host_pool.num_free == self.num_host_blocks
        assert self.memory.used_lanes == []
        assert self.memory.prefix.num_pending == 0
        assert sorted(r.index for r in self.finished) == sorted(r.index for r in self.requests), "each ends once"
        assert sum(self.counters.finished.values()) == len(self.requests)

    def solo_steps(self) -> int:
        """Steps that the requests would take one after the other, with the whole pool to each."""
        total = 0
        for request in self.requests:
            assert request.params.max_tokens is not None
            total += -(-request.num_prompt_tokens // self.max_num_batched_tokens) + request.params.max_tokens - 1
        return total

    def _requests_of(self, plan: StepPlan) -> list[Request]:
        lanes = set(plan.lanes.tolist())
        return [request for request in self.scheduler.running if lanes & set(request.lanes)]

    def _fail_draws(self, plan: StepPlan, result: StepResult, failure: DrawFailure) -> StepResult:
        of_draw = plan.lanes[plan.sampling.slices]
        bad = [i for i, lane in enumerate(of_draw.tolist()) if lane in failure.request.lanes]
        return replace(result, errors=dict.fromkeys(bad, failure.reason))

    def _poison(self, step: int) -> None:
        """Overwrite every cell that no sequence and no prefix entry has a right to read from now on."""
        memory = self.memory
        readable = np.zeros((self.num_blocks, self.block_size), np.bool_)
        readable[memory.pool.published] = True
        lanes = [lane for lane in memory.used_lanes if not memory.on_host[lane]]
        for lane in lanes:
            entries = int(memory.blocks.num_entries[lane])
            ids, masks = memory.blocks.ids[lane, :entries], memory.blocks.masks[lane, :entries]
            live = bits.unpack(masks, self.block_size).reshape(entries, self.block_size)
            np.logical_or.at(readable, ids[ids >= 0], live[ids >= 0])
        readable |= bits.unpack(memory.moves.claimed(), self.block_size).reshape(readable.shape)  # about to be mapped
        dead = np.flatnonzero(~readable.reshape(-1))
        self.sim.cells[dead] = mix64(dead, step, 0xDEAD)
        gone = np.flatnonzero(np.repeat(memory.host_pool.refs == 0, self.block_size))
        self.sim.host_cells[gone] = mix64(gone, step, 0xDEAD)

    def _evict(self, evictor: Evictor) -> None:
        for request in self.scheduler.running:
            for sequence in request.sequences:
                if sequence.lane is None:
                    continue
                length = int(self.memory.tokens.lengths[sequence.lane])
                if length <= self._reached[sequence]:
                    continue  # recomputed: what died then dies again by itself
                self._reached[sequence] = length
                dead = self.deaths_of(sequence)
                positions = [p for p in evictor(sequence, length) if p not in dead]
                if positions:
                    self.scheduler.evict(sequence, positions)
                    self._deaths[sequence].update(dict.fromkeys(positions, length))

    def _check_counters(self) -> None:
        counters = self.counters
        now = (counters.steps, counters.tokens_computed, counters.tokens_generated, counters.preemptions)
        assert all(a >= b for a, b in zip(now, self._last_counters, strict=True)), "a counter went back"
        self._last_counters = now
        assert counters.peak_held_blocks <= self.num_blocks
        assert not counters.given_up, "a request was admitted that cannot run"
