"""`Scheduler`: decides, step by step, which tokens run, and enters in the books what came of it.

There is no prefill or decode mode: a sequence has computed so many of its known tokens and catches up to them within
the step's token budget. First come, first served; when blocks are short the latest request gives way.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from vtoken.base.clock import Clock
from vtoken.base.errors import ConfigError, EngineError, RequestError
from vtoken.base.sampling_params import SamplingParams
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.slot_allocator import Placement
from vtoken.schedule.batch import PlanBuilder
from vtoken.schedule.capacity import Capacity
from vtoken.schedule.lane_state import NEVER, LaneState
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.sequence import FinishReason, Request, Sequence, Status


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of a request.

    `max_passes`: how many later requests may be admitted past one that waits at the head of the queue for memory.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    preemption: str = "recompute"  # or "swap", "auto"
    eos_token_ids: frozenset[int] = frozenset()
    max_passes: int = 16

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}, but "
                "each running sequence needs a token of the step"
            )


@dataclass
class SchedulerCounters:
    """Totals since the start; they only grow."""

    steps: int = 0
    failed_steps: int = 0
    tokens_computed: int = 0  # prompt, answer and recomputed tokens that went through the model
    tokens_generated: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    swap_fallbacks: int = 0  # swaps that became recomputes because the host pool was full
    peak_held_blocks: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))  # requests

    def copy(self) -> SchedulerCounters:
        return replace(self, finished=self.finished.copy())

    @property
    def preemptions(self) -> int:
        return self.preemptions_recompute + self.preemptions_swap


@dataclass(frozen=True)
class _Flight:
    """A plan whose result is awaited."""

    plan: StepPlan
    draws: list[Sequence]
    touched: set[Request]


class Scheduler:
    """The one scheduler: under the engine with a real executor, in tests and simulations with a simulated one.

    Use: `plan = schedule()`, execute it, then `apply(result)`, or `fail(error)` if the step as a whole failed; and
    `take_finished()` now and then for the requests that have ended.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVCacheManager,
        clock: Clock,
        *,
        costs: PreemptionCosts | None = None,
        row_positions: bool = False,
    ) -> None:
        if config.preemption == "auto" and costs is None:
            raise ConfigError("preemption='auto' needs the machine's speeds (PreemptionCosts) to choose by")
        self.config = config
        self.memory = memory
        self.counters = SchedulerCounters()
        self.capacity = Capacity(memory.pool.num_blocks, memory.block_size, config.max_model_len, config.max_num_seqs)
        self._clock = clock
        self._costs = costs
        self._row_positions = row_positions
        self._eos = np.array(sorted(config.eos_token_ids), np.int64)
        self._state = LaneState()
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # these three by order of arrival
        self._preempted: list[Request] = []
        self._suspects: list[Request] = []
        self._num_running = 0  # sequences of running requests, those still to fork included
        self._lanes: NDArray[np.int64] | None = None  # of the running requests; None when out of date
        self._num_arrived = 0
        self._is_blocked = False  # nothing could be admitted for lack of blocks
        self._flight: _Flight | None = None
        self._aborts: list[str] = []  # asked for while a step was in flight
        self._finished: list[Request] = []  # ended, and not yet taken

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        seed: int,
        cache_salt: str | None = None,
    ) -> Request:
        """Queue a request. Raises RequestError, at once, for one that could never run."""
        if request_id in self._requests:
            raise RequestError(f"request_id: {request_id!r} is in use by a request that has not finished", "request_id")
        max_tokens = self.capacity.clamp(len(prompt_token_ids), params.max_tokens, params.n)
        request = Request(
            request_id,
            prompt_token_ids,
            params.replace(max_tokens=max_tokens),
            seed,
            self._num_arrived,
            self._clock.now(),
            self.memory.block_size,
            cache_salt,
        )
        self._num_arrived += 1
        self._requests[request_id] = request
        self._waiting.append(request)
        self._is_blocked = False
        return request

    def abort(self, request_id: str) -> bool:
        """End a request, in whatever state, and give its blocks back. Unknown or ended ids are no error: False.

        While a step is in flight the request ends with it.
        """
        if request_id not in self._requests:
            return False
        if self._flight is not None:
            self._aborts.append(request_id)
        else:
            self._finish_request(self._requests[request_id], FinishReason.ABORT)
        return True

    def evict(self, sequence: Sequence, positions: SequenceOf[int]) -> None:
        """Mark tokens of a running sequence dead, between two steps. Their deaths are replayed if it is recomputed."""
        if sequence.lane is None or self._flight is not None:
            raise ValueError("tokens can be evicted between steps, from a sequence that has blocks")
        rows = np.array([self.memory.tokens.row_of(sequence.lane, p) for p in positions], np.int64)
        self.memory.evict(np.full(len(rows), sequence.lane), rows)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that never ran."""
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    # --- plan -------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        if self._flight is not None:
            raise EngineError("schedule() was called while a step is in flight; apply() or fail() comes first")
        batch = PlanBuilder(self.memory, self._state, self.config.max_num_batched_tokens)
        if self._suspects:
            self._run_suspect(batch)
        else:
            num_preempted = self.counters.preemptions
            self._run(batch)
            if self.counters.preemptions == num_preempted:
                self._resume(batch)
                if not self._preempted:  # no admissions while one that was promised its blocks waits for them
                    self._admit(batch)
        if batch.is_empty:
            return None
        plan = batch.build(self.counters.steps, row_positions=self._row_positions)
        self._flight = _Flight(plan, batch.draws, batch.touched)
        self.counters.steps += 1
        held = self.memory.pool.num_blocks - self.memory.pool.num_free - self.memory.prefix.num_cached
        self.counters.peak_held_blocks = max(self.counters.peak_held_blocks, held)
        return plan

    def _run(self, batch: PlanBuilder, only: Request | None = None) -> None:
        """Let the running sequences go on, those of all requests or of `only` one; make room where blocks are short."""
        while True:
            lanes = self._running_lanes() if only is None else np.array(only.lanes, np.int64)
            if not len(lanes):
                return
            self._replay_deaths(lanes)
            counts = self._share_budget(lanes)
            lanes, counts = lanes[counts > 0], counts[counts > 0]
            placement = self.memory.plan_extend(lanes, counts)
            if placement.num_blocks <= self.memory.num_available:
                batch.extend(lanes, counts, self.memory.extend(placement))
                return
            self._make_room(batch, placement, only)

    def _make_room(self, batch: PlanBuilder, placement: Placement, only: Request | None) -> None:
        """Rungs 4 and 6 of the pressure ladder: holes that are there already, then the latest request."""
        if self._reclaim_holes(batch, placement.num_blocks):
            return
        spared = only or self._running[0]  # the oldest always makes progress
        victims = [request for request in self._running if request is not spared]
        if victims:
            self._preempt(victims[-1], batch)
        else:
            # `add` promised that a lone request fits, so this is a bug of ours; it must not hang the engine.
            missing = f"{placement.num_blocks} blocks needed, {self.memory.num_available} available"
            self._finish_request(spared, FinishReason.ERROR, missing)

    def _reclaim_holes(self, batch: PlanBuilder, num_needed: int) -> bool:
        memory = self.memory
        lanes = self._running_lanes()
        returned = 0
        for lane in lanes[memory.tokens.evicted[lanes]].tolist():
            copy, num_returned = memory.reclaim(lane, spare_cells=1)
            returned += num_returned
            if copy is not None:
                batch.copy(copy, [self._state.of(lane).request])
            if memory.num_available >= num_needed:
                break
        return returned > 0

    def _share_budget(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens each lane may compute: one for whoever decodes, the rest for prompts.

        The oldest prompt gets half of the step's budget at least, so that others cannot hold it up by more than twice
        its time; what the later ones and the queue could use of the rest is theirs, so that it does not hold them up.
        """
        state, budget = self._state, self.config.max_num_batched_tokens
        need = np.minimum(state["total"][lanes], state["cut"][lanes]) - self.memory.tokens.lengths[lanes]
        counts: NDArray[np.int64] = (need == 1).astype(np.int64)
        left = budget - int(counts.sum())
        prompts = np.flatnonzero(need > 1)
        if len(prompts):
            prompts = prompts[np.argsort(state["arrival"][lanes[prompts]], kind="stable")]
            others = int(need[prompts[1:]].sum()) + self._waiting_tokens(budget)
            oldest = min(left, max(left - others, -(-budget // 2)))
            for i, allowed in zip(prompts.tolist(), [oldest] + [left] * (len(prompts) - 1), strict=True):
                counts[i] = min(int(need[i]), allowed, left)
                left -= int(counts[i])
        return counts

    def _waiting_tokens(self, enough: int) -> int:
        """Prompt tokens in the queue that could run now, counted up to `enough`."""
        total = 0
        if not self._is_blocked and not self._preempted and self._num_running < self.config.max_num_seqs:
            for request in self._waiting:
                total += request.num_prompt_tokens
                if total >= enough:
                    break
        return total

    def _replay_deaths(self, lanes: NDArray[np.int64]) -> None:
        """Sequences that were recomputed lose their tokens again where they had lost them; nobody is asked again."""
        lengths = self.memory.tokens.lengths
        for lane in lanes[(lengths[lanes] == self._state["cut"][lanes])].tolist():
            sequence, length = self._state.of(lane), int(lengths[lane])
            positions = [position for position, died in sequence.died_at.items() if died == length]
            if positions:
                self.evict(sequence, positions)
            self._set_cut(lane, length + 1)

    def _set_cut(self, lane: int, first: int) -> None:
        """The next length, from `first` on, at which something is to happen to a sequence: a recorded death, or its
        choices fork."""
        sequence = self._state.of(lane)
        cuts = [died for died in sequence.died_at.values() if died >= first]
        if sequence.request.unforked:
            cuts.append(sequence.request.num_prompt_tokens)
        self._state["cut"][lane] = min(cuts, default=NEVER)

    # --- admit, resume, preempt -------------------------------------------------------------------------------------

    def _admit(self, batch: PlanBuilder) -> None:
        """First come, first served; while the head waits for blocks, at most `max_passes` others may pass it."""
        tried = 0  # requests at the front of the queue for which there are no blocks
        while tried < len(self._waiting):
            request, head = self._waiting[tried], self._waiting[0]
            if tried and head.num_passes + tried > self.config.max_passes:
                break
            if batch.tokens_left < 1 or self._num_running + request.params.n > self.config.max_num_seqs:
                return
            if not self._start(request, batch):
                tried += 1
                continue
            del self._waiting[tried]
            if tried:
                head.num_passes += 1
        self._is_blocked = tried > 0

    def _resume(self, batch: PlanBuilder) -> None:
        for request in list(self._preempted):
            num_sequences = len(request.unfinished)
            if batch.tokens_left < num_sequences or self._num_running + num_sequences > self.config.max_num_seqs:
                return
            if not self._bring_back(request, batch):
                return
            self._preempted.remove(request)

    def _bring_back(self, request: Request, batch: PlanBuilder) -> bool:
        if request.status is Status.PREEMPTED:
            return self._start(request, batch)
        lanes = request.lanes
        # A block each to go on with, or it would be the first to be preempted again; alone it needs no such care.
        spare = len(lanes) if self._running else 0
        if len(self.memory.swap_blocks(lanes)) + spare > self.memory.num_available:
            return False
        copy = self.memory.swap_in(lanes)
        assert copy is not None, "there were enough blocks a moment ago"
        batch.copy(copy, [request])
        self._enter(request)
        counts = np.ones(len(lanes), np.int64)
        placement = self.memory.plan_extend(np.array(lanes), counts)
        if placement.num_blocks <= self.memory.num_available:
            batch.extend(np.array(lanes), counts, self.memory.extend(placement))
        return True

    def _start(self, request: Request, batch: PlanBuilder) -> bool:
        """Give a request its blocks, all that its known text needs or none, and its first tokens of the step."""
        memory, leader = self.memory, request.leader
        goal = request.num_prompt_tokens if request.unforked else len(leader.token_ids)
        leader.hashes.extend(leader.token_ids, goal)
        # One token is always left to compute, and what follows a death was computed without the dead.
        matched = memory.match(leader.hashes, min([goal - 1, *leader.died_at.values()]))
        reserve = min(goal, _peak_live(leader.died_at, goal) + len(matched) * memory.block_size)
        later = 0
        if request.unforked and len(leader.token_ids) > goal:  # choices that go on after the fork, each by itself
            shared = goal // memory.block_size
            own = sum(-(-len(s.token_ids) // memory.block_size) - shared for s in request.unfinished)
            later = max(0, shared + own - -(-reserve // memory.block_size))
        if memory.blocks_to_admit(reserve, matched) + later > memory.num_available:
            return False
        lane = memory.admit(reserve, matched)
        assert lane is not None, "there were enough blocks a moment ago"
        prompt = request.num_prompt_tokens
        assert request.params.max_tokens is not None, "max_tokens is clamped when a request is added"
        self._state.open(lane, leader, prompt + request.params.max_tokens)
        self._set_cut(lane, int(memory.tokens.lengths[lane]))
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock.now()
            request.num_cached_tokens = int(memory.tokens.lengths[lane])
        self._enter(request)
        self._replay_deaths(np.array([lane]))
        need = min(len(leader.token_ids), int(self._state["cut"][lane])) - int(memory.tokens.lengths[lane])
        lanes, counts = np.array([lane]), np.array([min(need, batch.tokens_left)])
        batch.extend(lanes, counts, memory.extend(memory.plan_extend(lanes, counts)))
        return True

    def _preempt(self, request: Request, batch: PlanBuilder | None) -> None:
        """Take a request's blocks, all of them: to the host if asked to and possible, else they are recomputed."""
        copy = None
        if batch is not None and self._wants_swap(request):
            copy = self.memory.swap_out(request.lanes)
            if copy is None:
                self.counters.swap_fallbacks += 1
            else:
                batch.copy(copy, [request])
        self._leave(request)
        if copy is not None:
            request.status = Status.SWAPPED
            self.counters.preemptions_swap += 1
        else:
            self._drop_lanes(request)
            request.status = Status.PREEMPTED
            self.counters.preemptions_recompute += 1
        request.num_preemptions += 1
        insort(self._preempted, request, key=lambda r: r.index)

    def _wants_swap(self, request: Request) -> bool:
        if self.config.preemption == "recompute" or request.unforked:
            return False
        lanes = np.array(request.lanes)
        if (self._state["total"][lanes] - self.memory.tokens.lengths[lanes] != 1).any():
            return False  # in the middle of its prompt: blocks that hold nothing yet would have to be found again
        if self.config.preemption == "swap":
            return True
        assert self._costs is not None
        num_tokens = int(self.memory.tokens.lengths[lanes].sum())
        return self._costs.prefers_swap(num_tokens, len(self.memory.swap_blocks(request.lanes)))

    def _enter(self, request: Request) -> None:
        request.status = Status.RUNNING
        insort(self._running, request, key=lambda r: r.index)
        self._num_running += len(request.unfinished)
        self._lanes = None

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self._num_running -= len(request.unfinished)
        self._lanes = None

    def _drop_lanes(self, request: Request) -> None:
        """Forget where a request lies. What is needed to come back the same is kept: its tokens and their deaths."""
        for lane in request.lanes:
            sequence = self._state.of(lane)
            # A replay that was cut short again still has later deaths to come.
            sequence.died_at |= self.memory.tokens.died_at(lane)
            self._state.close(lane)
            self.memory.release([lane])
        request.unforked = request.unfinished[1:]

    def _running_lanes(self) -> NDArray[np.int64]:
        """Ascending, so that neighbours in the tables are neighbours in the plan."""
        if self._lanes is None:
            self._lanes = np.sort(np.array([lane for request in self._running for lane in request.lanes], np.int64))
        return self._lanes

    # --- apply ------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[tuple[Sequence, int]]:
        """Enter the facts of the step in flight. Returns the tokens that were drawn, each with its sequence."""
        flight = self._flight
        if flight is None or flight.plan.step != result.step:
            raise EngineError(f"a result of step {result.step} came in, but that step is not in flight")
        self._flight = None
        plan, memory = flight.plan, self.memory
        memory.commit()
        self.counters.tokens_computed += plan.num_tokens
        for name, values in result.statistics.items():
            memory.tokens.add_statistics(name, plan.lanes, values)
        for ticket in result.ended:
            memory.finish(ticket)
        self._fork_choices(plan.lanes)
        drawn = self._take_tokens(flight.draws, result)
        # Whoever got a token in a step of its own is not what made the other one fail.
        cleared = {sequence.request for sequence in flight.draws}
        self._suspects = [suspect for suspect in self._suspects if suspect not in cleared]
        self._end_aborted()
        return drawn

    def take_finished(self) -> list[Request]:
        """The requests that have ended since the last call, whatever ended them."""
        finished, self._finished = self._finished, []
        return finished

    def _fork_choices(self, lanes: NDArray[np.int32]) -> None:
        memory = self.memory
        at_prompt = memory.tokens.lengths[lanes] == self._state["prompt"][lanes]
        for lane in lanes[at_prompt].tolist():
            leader = self._state.of(lane)
            choices, leader.request.unforked = leader.request.unforked, []
            self._state["num_unforked"][lane] = 0
            for choice in choices:
                twin = memory.fork(lane)
                self._state.open(twin, choice, int(self._state["limit"][lane]))
                self._set_cut(twin, choice.request.num_prompt_tokens)
                self._lanes = None
            self._set_cut(lane, leader.request.num_prompt_tokens)

    def _take_tokens(self, draws: list[Sequence], result: StepResult) -> list[tuple[Sequence, int]]:
        """Append what was drawn, and end the sequences that are complete."""
        failed = {draws[i].request: reason for i, reason in result.errors.items()}
        for request, reason in failed.items():
            for lane in request.lanes:
                self.memory.unpublish(lane)  # nobody is to be handed what may be broken
            self._finish_request(request, FinishReason.ERROR, reason)
        tokens = result.tokens
        if failed:
            kept = [i for i, sequence in enumerate(draws) if sequence.request not in failed]
            draws, tokens = [draws[i] for i in kept], tokens[kept]
        if not draws:
            return []
        state = self._state
        lanes = np.array([sequence.lane for sequence in draws], np.int64)
        state["total"][lanes] += 1
        state["last_token"][lanes] = tokens
        drawn = list(zip(draws, tokens.tolist(), strict=True))
        for sequence, token in drawn:
            sequence.token_ids.append(token)
        self.counters.tokens_generated += len(draws)
        is_first = state["total"][lanes] - state["prompt"][lanes] == 1
        for i in np.flatnonzero(is_first).tolist():
            draws[i].request.first_token_time = draws[i].request.first_token_time or self._clock.now()
        stops = np.isin(tokens, self._eos) & ~state["ignore_eos"][lanes]
        for i in np.flatnonzero(state["own_stops"][lanes]).tolist():
            stops[i] |= int(tokens[i]) in draws[i].request.params.stop_token_ids
        for i in np.flatnonzero(stops | (state["total"][lanes] >= state["limit"][lanes])).tolist():
            if stops[i]:
                draws[i].stop_reason = int(tokens[i])
            self._finish_sequence(draws[i], FinishReason.STOP if stops[i] else FinishReason.LENGTH)
        return drawn

    def fail(self, error: BaseException) -> None:
        """The step in flight failed as a whole.

        If one request ran in it, that one ends with the error. Otherwise nobody knows whose fault it was: all that the
        step touched are recomputed, and run one at a time until each has got a token by itself.
        """
        flight = self._flight
        if flight is None:
            raise EngineError("fail() was called with no step in flight") from error
        self._flight = None
        self.memory.withdraw()
        self.counters.failed_steps += 1
        ran = {self._state.of(lane).request for lane in flight.plan.lanes.tolist()}
        if len(ran) == 1:
            self._finish_request(next(iter(ran)), FinishReason.ERROR, f"{type(error).__name__}: {error}")
        for request in sorted(ran | flight.touched, key=lambda r: r.index):
            if request.status is Status.RUNNING:
                self._preempt(request, None)
            elif request.status is Status.SWAPPED:  # the copy to the host may not have run
                self._drop_lanes(request)
                request.status = Status.PREEMPTED
        if len(ran) > 1:
            known = {*self._suspects, *ran}
            self._suspects = sorted((r for r in known if r.status is not Status.FINISHED), key=lambda r: r.index)
        self._end_aborted()

    def _run_suspect(self, batch: PlanBuilder) -> None:
        """After a failed step: the first request under suspicion runs alone, and nobody else is let in."""
        first = self._suspects[0]
        if first.status is Status.RUNNING:
            self._run(batch, only=first)
        elif self._bring_back(first, batch):
            self._preempted.remove(first)
        else:
            self._run(batch)  # those above suspicion go on until there are blocks for it

    # --- finish -----------------------------------------------------------------------------------------------------

    def _finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        request, lane = sequence.request, sequence.lane
        assert lane is not None, "only a sequence that ran comes to an end by itself"
        self._num_running -= 1
        sequence.finish_reason = reason
        sequence.died_at = self.memory.tokens.died_at(lane)
        self._state.close(lane)
        self.memory.release([lane])
        self._lanes = None
        self._is_blocked = False
        if not request.unfinished:
            self._running.remove(request)
            self._end(request, reason)

    def _finish_request(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """The one way out for a request that does not end by itself, from every state."""
        if request.status is Status.RUNNING:
            self._leave(request)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        else:
            self._preempted.remove(request)
        self._drop_lanes(request)
        for sequence in request.unfinished:
            sequence.finish_reason = reason
        request.error = error
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.status = Status.FINISHED
        request.finish_time = self._clock.now()
        request.unforked = []
        del self._requests[request.request_id]
        self._suspects = [suspect for suspect in self._suspects if suspect is not request]
        self._is_blocked = False
        self.counters.finished[reason] += 1
        self._finished.append(request)

    def _end_aborted(self) -> None:
        for request_id in self._aborts:
            if request_id in self._requests:
                self._finish_request(self._requests[request_id], FinishReason.ABORT)
        self._aborts.clear()

    # --- looking in -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the scheduler and the books disagree. Slow: for tests."""
        self.memory.check()
        lanes = [lane for request in self._requests.values() for lane in request.lanes]
        assert sorted(lanes) == self.memory.used_lanes, "lanes of requests and lanes in the books differ"
        for lane in lanes:
            sequence = self._state.of(lane)
            assert sequence.lane == lane
            assert self._state["total"][lane] == len(sequence.token_ids)
        queues: Iterable[Request] = (*self._waiting, *self._running, *self._preempted)
        assert {request.request_id for request in queues} == set(self._requests), "a request is in no queue, or in two"
        assert self._num_running == sum(len(request.unfinished) for request in self._running)


def _peak_live(died_at: dict[int, int], length: int) -> int:
    """Most tokens live at once while `length` tokens are computed and die as recorded."""
    peak, dead = 0, 0
    for died in sorted(set(died_at.values())):
        if died > length:
            break
        peak = max(peak, died - dead)
        dead += sum(1 for d in died_at.values() if d == died)
    return max(peak, length - dead)
