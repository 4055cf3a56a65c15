"""`Scheduler`: decides, step by step, which tokens run, and enters in the books what came of it.

There is no prefill or decode mode: a sequence has computed so many of its known tokens and catches up to them within
the step's token budget. First come, first served; when blocks are short the latest request gives way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.base.clock import Clock
from vtoken.base.errors import ConfigError, EngineError, RequestError, describe
from vtoken.base.sampling_params import SamplingParams
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.policies.statistics import STATISTICS, Statistic
from vtoken.schedule.audit import check_books, check_result
from vtoken.schedule.batch import PlanBuilder, share_budget
from vtoken.schedule.beams import Beams, search_of
from vtoken.schedule.config import SchedulerConfig, SchedulerCounters
from vtoken.schedule.drawn import enter_tokens
from vtoken.schedule.entrance import Entrance
from vtoken.schedule.evictor import Evictor, Judgement
from vtoken.schedule.lane_state import LaneState
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.pressure import Relief
from vtoken.schedule.residents import Residents, WaitReason
from vtoken.schedule.scoring import enter_drawn, enter_scores
from vtoken.schedule.sequence import FinishReason, Request, Sequence, Status
from vtoken.schedule.text_rules import NO_TEXT_RULES, TextRules
from vtoken.schedule.timeline import Timeline

logger = logging.getLogger("vtoken")


@dataclass(frozen=True)
class _Flight:
    """A plan whose result is awaited."""

    plan: StepPlan
    draws: list[Sequence]
    touched: set[Request]  # by copies
    ran: set[Request]  # in slices


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
        statistics: frozenset[type[Statistic]] = frozenset(STATISTICS),
    ) -> None:
        if config.preemption == "auto" and costs is None:
            raise ConfigError("preemption='auto' needs the machine's speeds (PreemptionCosts) to choose by")
        self.config = config
        self.memory = memory
        self.counters = SchedulerCounters()
        self._entrance = Entrance(config, memory.pool.num_blocks, memory.block_size, statistics)
        self.capacity = self._entrance.capacity
        self._clock = clock
        self._row_positions = row_positions
        self._eos = np.array(sorted(config.eos_token_ids), np.int64)
        self._state = LaneState()
        self._evictor = Evictor(memory, self._state, self.counters)
        self._timeline = Timeline(config, memory, self._state, self.counters, self._evictor)
        self._relief = Relief(config, memory, self._state, self.counters, self._evictor)
        self._beams = Beams(memory, self._state)
        self._residents = Residents(
            config, memory, self._state, self.counters, clock, costs, self._evictor, self._timeline, self._relief
        )
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._suspects: list[Request] = []  # one of them made a step fail
        self._num_arrived = 0
        self._flight: _Flight | None = None
        self._landing: _Flight | None = None  # whose result is being entered
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
        text_rules: TextRules = NO_TEXT_RULES,
    ) -> Request:
        """Queue a request. Raises RequestError, at once, for one that could never run."""
        if request_id in self._requests:
            raise RequestError(f"request_id: {request_id!r} is in use by a request that has not finished", "request_id")
        request = self._entrance.make(
            request_id,
            prompt_token_ids,
            params,
            seed=seed,
            index=self._num_arrived,
            arrival_time=self._clock.now(),
            cache_salt=cache_salt,
            text_rules=text_rules,
        )
        self._num_arrived += 1
        self._requests[request_id] = request
        self._residents.add(request)
        return request

    def check_request(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Raise RequestError for a request that could never run. Any thread may ask, at any time."""
        self._entrance.check(num_prompt_tokens, params)

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

    def stop(self, sequence: Sequence, reason: str) -> None:
        """End one choice between two steps, as if it had stopped by itself: its text says so. No error if it has ended.

        Raises ValueError during a step.
        """
        if self._flight is not None:
            raise ValueError("a choice is stopped between steps")
        if not sequence.is_finished:
            sequence.stop_reason = reason
            self._finish_sequence(sequence, FinishReason.STOP)

    def evict(self, sequence: Sequence, positions: SequenceOf[int]) -> None:
        """Mark tokens of a running sequence dead, between two steps. Their deaths are replayed if it is recomputed.

        Raises KeyError for a position that does not live, ValueError for a sequence without blocks or during a step.
        """
        if sequence.lane is None or self._flight is not None:
            raise ValueError("tokens can be evicted between steps, from a sequence that has blocks")
        before = self.memory.counters.tokens_evicted
        self._timeline.evict(sequence, positions)
        self.counters.tokens_evicted_by_caller += self.memory.counters.tokens_evicted - before

    def died_at(self, sequence: Sequence) -> dict[int, int]:
        """Position -> the length of the text at which the token was evicted."""
        if sequence.lane is None:
            return dict(sequence.died_at)
        # While it is computed again, what is recorded has not all died in the books yet.
        return sequence.died_at | self.memory.tokens.died_at(sequence.lane)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that never ran."""
        return len(self._residents.waiting)

    @property
    def num_preempted(self) -> int:
        return len(self._residents.preempted)

    def waiting_by_reason(self) -> dict[WaitReason, int]:
        """See `Residents.waiting_by_reason`."""
        return self._residents.waiting_by_reason()

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._residents.running)

    @property
    def preempted(self) -> tuple[Request, ...]:
        return tuple(self._residents.preempted)

    @property
    def waiting(self) -> Iterator[Request]:
        """Those that never ran, in their order; not to be kept over a step."""
        return iter(self._residents.waiting)

    def judge(self, sequence: Sequence) -> Judgement | None:
        """What the policy of a sequence thinks of its live tokens now. Changes nothing.

        None if it has no policy or no blocks on the device, or if its policy has not seen enough to say.
        """
        lane = sequence.lane
        return None if lane is None or self.memory.on_host[lane] else self._evictor.judge(lane)

    # --- plan -------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        if self._flight is not None:
            raise EngineError("schedule() was called while a step is in flight; apply() or fail() comes first")
        batch = PlanBuilder(self.memory, self._state, self.config.max_num_batched_tokens)
        for copy, request in self._timeline.take_copies():
            batch.add_copy(copy, [request])
        try:
            return self._schedule(batch)
        except BaseException:  # Ctrl-C too: tokens have their cells already, and nothing will be written there
            self._undo({*self._residents.running, *batch.touched})
            raise

    def _schedule(self, batch: PlanBuilder) -> StepPlan | None:
        num_forgotten = self.memory.counters.blocks_forgotten
        self._fill(batch)
        # With nothing to run a plan may still be due: only so are copies heard of that pin blocks.
        while batch.is_empty and not self.memory.moves:
            if not self._requests:
                return None
            if self._suspects:
                self._suspects = []  # the one that was to run alone cannot: the others need not wait for it
            else:
                residents = self._residents
                self._give_up(next(iter((*residents.preempted, *residents.waiting, *residents.running))))
            self._fill(batch)
        plan = batch.build(
            self.counters.steps,
            self._evictor,
            row_positions=self._row_positions,
            rope_lengths=self.config.rope_lengths is not None,
        )
        ran = {self._state.of(lane).request for lane in plan.lanes.tolist()}
        self._flight = _Flight(plan, batch.draws, batch.touched, ran)
        self.counters.steps += 1
        self.memory.decisions.step = self.counters.steps
        self.counters.forgets += self.memory.counters.blocks_forgotten > num_forgotten
        self.counters.peak_held_blocks = max(self.counters.peak_held_blocks, self.memory.num_held)
        return plan

    def _fill(self, batch: PlanBuilder) -> None:
        """Whoever can run this step gets a slice."""
        self._relief.watch(batch, self._residents.lanes(), somebody_waits=self._residents.somebody_waits)
        if self._suspects:
            self._run_suspect(batch)
        else:
            num_preempted = self.counters.preemptions
            self._residents.make_way(batch)
            self._end_failed()
            self._run(batch)
            # Who had to go this step does not come back in it, unless he starts over and has left nothing to do.
            if self.counters.preemptions == num_preempted or batch.is_empty:
                self._residents.resume(batch)
                if not self._residents.preempted:  # nobody new while one that was promised its blocks waits for them
                    self._residents.admit(batch)
            if batch.is_empty:
                self._run(batch)  # who was let in, and has to make room for his next token first

    def _run(self, batch: PlanBuilder, only: Request | None = None) -> None:
        """Let the running sequences go on, those of all requests or of `only` one; make room where blocks are short."""
        while True:
            lanes = self._residents.lanes() if only is None else np.array(only.lanes, np.int64)
            if not len(lanes):
                return
            counts = self._share_budget(lanes)
            lanes, counts = lanes[counts > 0], counts[counts > 0]
            placement = self.memory.plan_extend(lanes, counts)
            if placement.num_blocks <= self.memory.num_available:
                batch.add_slices(lanes, counts, self.memory.extend(placement))
                return
            if self.memory.moves:
                # Rung 3: copies beside the steps are about to give blocks back. Who needs one waits a step for it.
                self.counters.drains += 1
                self._run_without_blocks(batch, lanes, counts)
                return
            spared = only or self._residents.running[0]  # the oldest always makes progress
            if self._residents.make_room(batch, placement.num_blocks, spared) | self._end_failed():
                continue
            if not self._residents.start_over(spared):
                self._give_up(spared)

    def _run_without_blocks(self, batch: PlanBuilder, lanes: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Let those go on that can do without a block more."""
        while len(lanes):
            placement = self.memory.plan_extend(lanes, counts)
            if placement.num_blocks <= self.memory.num_available:
                batch.add_slices(lanes, counts, self.memory.extend(placement))
                return
            # Of lanes that share a block the last may write there if the others copy: without them it is its turn.
            waits = np.isin(lanes, np.concatenate((placement.fresh[:, 0], placement.copied[:, 0])))
            lanes, counts = lanes[~waits], counts[~waits]

    def _give_up(self, request: Request) -> None:
        """`add` promised that a request fits alone, and it does not: a bug of ours. It must not stop the others."""
        self.counters.given_up += 1
        usage = self.memory.usage()
        reason = (
            f"the KV pool cannot hold it, though that was promised when it came: {usage.held_blocks} of "
            f"{self.memory.pool.num_blocks} blocks held; a bug of vtoken"
        )
        logger.error("request %s ends: %s", request.request_id, reason)
        self._finish_request(request, FinishReason.ERROR, reason)

    def _end_failed(self) -> bool:
        """End the requests whose policy has just failed under pressure, some of which may have had to go meanwhile.
        None of them has a slice in the plan. Returns whether there were any."""
        failed = self._evictor.take_failed()
        for request, reason in failed.items():
            self._finish_request(request, FinishReason.ERROR, reason)
        return bool(failed)

    def _share_budget(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens each lane may compute."""
        state, budget = self._state, self.config.max_num_batched_tokens
        need = np.minimum(state["total"][lanes], state["cut"][lanes]) - self.memory.tokens.lengths[lanes]
        return share_budget(need, state["arrival"][lanes], budget, self._residents.waiting_tokens)

    # --- apply ------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[tuple[Sequence, int]]:
        """Enter the facts of the step in flight. Returns the tokens that were drawn, each with its sequence."""
        flight = self._flight
        if flight is None or flight.plan.step != result.step:
            raise EngineError(f"a result of step {result.step} came in, but that step is not in flight")
        plan, memory = flight.plan, self.memory
        check_result(plan, result)
        memory.commit()
        self.counters.tokens_computed += plan.num_tokens
        self._evictor.enter(plan, result)
        for ticket in result.ended:
            memory.finish(ticket)
        for ticket in result.failed:
            memory.finish(ticket, copied=False)
        lanes = plan.lanes.astype(np.int64)
        failures = self._residents.reach(lanes)
        self._state["computed"][lanes] = memory.tokens.lengths[lanes]
        # Not before: a policy that is interrupted takes the tokens of the step with it.
        self._flight, self._landing = None, flight
        failed = {flight.draws[i].request: reason for i, reason in result.errors.items()}
        failed |= enter_scores(plan, result, self._state)
        for lane in (lane for request in failed for lane in request.lanes):
            memory.unpublish(lane)  # nobody is to be handed what may be broken
        failed |= {self._state.of(lane).request: reason for lane, reason in failures.items()}
        for request, reason in failed.items():
            self._finish_request(request, FinishReason.ERROR, reason)
        enter_drawn(flight.draws, plan.sampling.scored, result.drawn)
        drawn = self._take_tokens(flight.draws, result.tokens, failed)
        for request in self._beams.take(flight.draws, plan.sampling.searched, result.candidates):
            self._advance_beams(request)
        if self._suspects:  # whoever got a token in a step of its own is not what made the other one fail
            cleared = {sequence.request for sequence in flight.draws}
            self._suspects = [suspect for suspect in self._suspects if suspect not in cleared]
        self._end_aborted()
        self._landing = None
        return drawn

    def take_finished(self) -> list[Request]:
        """The requests that have ended since the last call, whatever ended them."""
        finished, self._finished = self._finished, []
        return finished

    def _take_tokens(
        self, draws: list[Sequence], tokens: NDArray[np.int32], failed: dict[Request, str]
    ) -> list[tuple[Sequence, int]]:
        """Append what was drawn, unless its request has failed, and end the sequences that are complete. Beams draw
        nothing."""
        kept = [i for i, s in enumerate(draws) if s.request not in failed and s.request.beam_search is None]
        if len(kept) < len(draws):
            draws, tokens = [draws[i] for i in kept], tokens[kept]
        if not draws:
            return []
        first, ended = enter_tokens(draws, tokens, self._state, self._eos)
        self.counters.tokens_generated += len(draws)
        for sequence in first:
            self._enter_first_token(sequence.request)
        for sequence, reason in ended:
            self._finish_sequence(sequence, reason)
        return list(zip(draws, tokens.tolist(), strict=True))

    def _enter_first_token(self, request: Request) -> None:
        """A choice has its first token; the first of them is the request's."""
        if request.first_token_time is None:
            request.first_token_time = self._clock.now()
            self.counters.prompt_tokens += request.num_prompt_tokens
            self.counters.prompt_tokens_cached += request.num_cached_tokens

    def _advance_beams(self, request: Request) -> None:
        is_over = self._beams.advance(request)
        self._enter_first_token(request)
        self.counters.tokens_generated += len(request.sequences)
        self._residents.changed()
        if is_over:
            answers = search_of(request).finished
            for sequence, answer in zip(request.sequences, answers, strict=True):
                sequence.token_ids[request.num_prompt_tokens :] = answer.token_ids
                sequence.total_logprob, sequence.stop_reason = answer.total, answer.stop_reason
                sequence.has_stop_id = answer.reason is FinishReason.STOP
                self._finish_sequence(sequence, answer.reason)
                sequence.died_at = answer.died_at

    def fail(self, error: BaseException) -> None:
        """The step in flight failed as a whole.

        If it was about one request alone, that one ends with the error. Otherwise nobody knows whose fault it was: all
        that the step touched are recomputed, and run one at a time until each has got a token by itself. An
        interruption (Ctrl-C) is nobody's fault: everything is recomputed.
        """
        flight = self._flight
        if flight is None:
            self._crash(error)
            return
        self._flight = None
        self.counters.failed_steps += 1
        ran = flight.ran
        is_fault = isinstance(error, Exception)
        is_alone = len(ran) == 1 and flight.touched <= ran
        if is_fault and is_alone:
            self._finish_request(next(iter(ran)), FinishReason.ERROR, describe(error))
        self._undo(ran | flight.touched)
        if is_fault and not is_alone:
            self._suspects = sorted({*self._suspects, *ran}, key=lambda r: r.index)
        self._end_aborted()

    def _crash(self, error: BaseException) -> None:
        """The step took place, but what came of it could not be entered: a bug of ours, or an interruption. Some of its
        requests have their tokens and some do not, and nobody knows which, so all of them end; the engine goes on."""
        flight, self._landing = self._landing, None
        if flight is None:
            raise EngineError("fail() was called with no step in flight") from error
        whose = "a bug of vtoken" if isinstance(error, Exception) else "an interruption"
        logger.error("what a step brought could not be entered; %s", whose, exc_info=error)
        self.counters.failed_steps += 1
        reason = f"what a step brought could not be entered; {whose}: {describe(error)}"
        for request in flight.ran:
            request.error = request.error or reason
            for sequence in request.sequences:
                if not sequence.is_finished or sequence in flight.draws:  # who has just ended lacks his last token
                    sequence.finish_reason = FinishReason.ERROR
        self._residents.purge(flight.ran)
        for request in sorted(flight.ran, key=lambda r: r.index):
            if request.request_id in self._requests:
                self._end(request, FinishReason.ERROR)
        self._undo(flight.touched)
        self._end_aborted()

    def _undo(self, touched: set[Request]) -> None:
        """A step did not take place: what it was to write is not there, so whoever it touched is computed again."""
        self.memory.withdraw()
        owned = {lane for request in self._requests.values() for lane in request.lanes}
        self.memory.release([lane for lane in self.memory.used_lanes if lane not in owned])  # opened just now
        for request in sorted(touched, key=lambda r: r.index):
            if request.status is Status.RUNNING:
                self._residents.preempt(request, None)
            elif request.status is Status.SWAPPED:  # the copy to the host may not have run
                self._residents.drop_lanes(request)
                request.status = Status.PREEMPTED

    def _run_suspect(self, batch: PlanBuilder) -> None:
        """After a failed step: the first request under suspicion runs alone, and nobody else is let in."""
        first = self._suspects[0]
        if first.status is Status.RUNNING:
            self._run(batch, only=first)
        elif not self._residents.bring_back(first, batch):
            self._run(batch)  # those above suspicion go on until there are blocks for it

    # --- finish -----------------------------------------------------------------------------------------------------

    def _finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._residents.close(sequence)
        if not sequence.request.unfinished:
            self._end(sequence.request, reason)

    def _finish_request(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """The one way out for a request that does not end by itself, from every state."""
        self._residents.remove(request)
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
        self.counters.finished[reason] += 1
        self._finished.append(request)

    def _end_aborted(self) -> None:
        for request_id in self._aborts:
            if request_id in self._requests:
                self._finish_request(self._requests[request_id], FinishReason.ABORT)
        self._aborts.clear()

    # --- looking in -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError if the scheduler and the books disagree. Slow: for tests."""
        check_books(self.memory, self._state, self._requests, self._residents)
