"""`Residents`: which requests have blocks and which wait for them; how they come in, give way and come back."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vtoken.base.clock import Clock
from vtoken.base.errors import InvariantError
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.batch import PlanBuilder
from vtoken.schedule.config import SchedulerConfig, SchedulerCounters
from vtoken.schedule.demand import Demand
from vtoken.schedule.evictor import Evictor
from vtoken.schedule.lane_state import LaneState
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.pressure import Relief
from vtoken.schedule.sequence import Request, Sequence, Status
from vtoken.schedule.timeline import Timeline

# Requests that had blocks and wait to go on: `preempted`, `swapped`. Those that never ran wait for `blocks`, for one of
# the `max_num_seqs` places, or only for a `step` with tokens to spare.
WaitReason = Literal["blocks", "max_num_seqs", "step", "preempted", "swapped"]


class Residents:
    """The three queues, by order of arrival: `waiting` (never ran), `running` (have blocks), `preempted` (had some).

    First come, first served; when blocks are short the latest gives way, all its sequences together, and comes back
    before anybody new is let in.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVCacheManager,
        state: LaneState,
        counters: SchedulerCounters,
        clock: Clock,
        costs: PreemptionCosts | None,
        evictor: Evictor,
        timeline: Timeline,
        relief: Relief,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.num_running = 0  # sequences of running requests, those still to fork included
        self.is_blocked = False  # the head of the queue waits for blocks
        self._held_up_by: WaitReason = "step"
        self._config = config
        self._memory = memory
        self._state = state
        self._counters = counters
        self._clock = clock
        self._costs = costs
        self._evictor = evictor
        self._timeline = timeline
        self._relief = relief
        self._demand = Demand(config, memory)
        self._lanes: NDArray[np.int64] | None = None  # of the running requests; None when out of date

    @property
    def somebody_waits(self) -> bool:
        """Whether there is a request that lacks nothing but blocks."""
        return self.is_blocked or bool(self.preempted)

    def waiting_by_reason(self) -> dict[WaitReason, int]:
        """How many requests wait, and what for, as the last step found it."""
        counts = dict.fromkeys(get_args(WaitReason), 0)
        counts["swapped"] = sum(request.status is Status.SWAPPED for request in self.preempted)
        counts["preempted"] = len(self.preempted) - counts["swapped"]
        # Nobody new is let in while one that was preempted waits for his blocks.
        counts["blocks" if self.preempted else self._held_up_by] = len(self.waiting)
        return counts

    def waiting_tokens(self, enough: int) -> int:
        """Prompt tokens in the queue that could run now, counted up to `enough`."""
        total = 0
        if not self.is_blocked and not self.preempted and self.num_running < self._config.max_num_seqs:
            for request in self.waiting:
                total += request.num_prompt_tokens
                if total >= enough:
                    break
        return total

    def lanes(self) -> NDArray[np.int64]:
        """Of the running requests; ascending, so that neighbours in the tables are neighbours in the plan."""
        if self._lanes is None:
            self._lanes = np.sort(np.array([lane for request in self.running for lane in request.lanes], np.int64))
        return self._lanes

    def changed(self) -> None:
        """Lanes of running requests are others than they were."""
        self._lanes = None

    def reach(self, lanes: NDArray[np.int64]) -> dict[int, str]:
        """See `Timeline.reach`."""
        num_forks = self._memory.counters.forks
        failures = self._timeline.reach(lanes)
        if self._memory.counters.forks != num_forks:
            self._lanes = None
        return failures

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.is_blocked = False

    # --- coming in, going out ---------------------------------------------------------------------------------------

    def admit(self, batch: PlanBuilder) -> None:
        """First come, first served; while the head waits for blocks, at most `max_passes` others may pass it."""
        self._held_up_by = "step"
        tried = 0  # requests at the front of the queue for which there are no blocks
        while tried < len(self.waiting):
            request, head = self.waiting[tried], self.waiting[0]
            # `tried` counts too: it bounds the search, not only the passing.
            if tried and head.num_passes + tried > self._config.max_passes:
                break
            if batch.tokens_left < 1:
                break
            if self.num_running + request.params.num_choices > self._config.max_num_seqs:
                self._held_up_by = "max_num_seqs"
                break
            if not self._start(request, batch):
                tried += 1
            elif tried:
                head.num_passes += 1
        self.is_blocked = tried > 0
        if self.is_blocked:
            self._held_up_by = "blocks"

    def resume(self, batch: PlanBuilder) -> None:
        """Bring back those who were preempted, in the order of their arrival."""
        for request in list(self.preempted):
            num_sequences = len(request.unfinished)
            if batch.tokens_left < num_sequences or self.num_running + num_sequences > self._config.max_num_seqs:
                return
            if not self.bring_back(request, batch):
                return

    def bring_back(self, request: Request, batch: PlanBuilder) -> bool:
        """Let a preempted request go on, if there are blocks for it."""
        return self._start(request, batch) if request.status is Status.PREEMPTED else self._swap_in(request, batch)

    def _swap_in(self, request: Request, batch: PlanBuilder) -> bool:
        lanes = request.lanes
        if self._demand.blocks_to_swap_in(request, len(self.running)) > self._memory.num_available:
            return False
        copy = self._memory.swap_in(lanes)
        assert copy is not None, "there were enough blocks a moment ago"
        batch.add_copy(copy, [request])
        self._enter(request)
        counts = np.ones(len(lanes), np.int64)
        placement = self._memory.plan_extend(np.array(lanes), counts)
        if placement.num_blocks <= self._memory.num_available:
            batch.add_slices(np.array(lanes), counts, self._memory.extend(placement))
        return True

    def _start(self, request: Request, batch: PlanBuilder) -> bool:
        """Give a request its blocks, all that its known text needs or none, and its first tokens of the step."""
        memory, leader = self._memory, request.leader
        demand, num_others = self._demand, len(self.running)
        matched = demand.match(request)
        if demand.missing_to_start(request, matched, num_others) > 0:
            if not demand.can_be_tight(request, num_others):
                return False
            request.is_tight = True  # its own tokens are the first that it gives up
            matched = demand.match(request)
            if demand.missing_to_start(request, matched, num_others) > 0:
                request.is_tight = False
                return False
        lane = memory.admit(demand.reserve(request, matched), matched)
        assert lane is not None, "there were enough blocks a moment ago"
        prompt = request.num_prompt_tokens
        assert request.params.max_tokens is not None, "max_tokens is clamped when a request is added"
        self._state.open(lane, leader, prompt + request.params.max_tokens)
        self._evictor.open(lane, leader)
        self._timeline.open(lane)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock.now()
            request.num_cached_tokens = int(memory.tokens.lengths[lane])
        self._enter(request)
        lanes = np.array([lane])
        if self._timeline.reach(lanes):  # the cached part ends where deaths are recorded
            raise InvariantError("a policy was asked about tokens that no query of this request has seen")
        need = min(len(leader.token_ids), int(self._state["cut"][lane])) - int(memory.tokens.lengths[lane])
        counts = np.array([min(need, batch.tokens_left)])
        placement = memory.plan_extend(lanes, counts)
        if placement.num_blocks <= memory.num_available:  # else it has yet to give up what lies in its last block
            batch.add_slices(lanes, counts, memory.extend(placement))
        return True

    def make_way(self, batch: PlanBuilder) -> None:
        """A request that waits is pressure too: rungs 4 and 5 for the first of them, if they can bring what it needs.
        Before anybody runs, since no token of a slice may move."""
        lanes, tokens = self.lanes(), self._memory.tokens
        may_help = tokens.evicted[lanes] | (self._state["policy"][lanes] >= 0)
        first = next(iter(self.preempted or self.waiting), None)
        if first is None or not may_help.any() or self._memory.moves:  # blocks that are on their way come first
            return
        num_sequences = len(first.unfinished) if first.status is not Status.WAITING else first.params.num_choices
        if self.num_running + num_sequences > self._config.max_num_seqs:
            return
        if first.status is Status.SWAPPED:
            missing = self._demand.blocks_to_swap_in(first, len(self.running)) - self._memory.num_available
        else:
            missing = self._demand.missing_to_start(first, self._demand.match(first), len(self.running))
        if missing <= 0:
            return
        goal = self._memory.num_available + missing
        if self._relief.reclaim(batch, lanes, missing):
            missing = goal - self._memory.num_available
        may_evict = self._config.admission_evicts and self._config.on_pressure == "evict"
        if may_evict and 0 < missing <= self._relief.attainable(lanes):
            while missing > 0 and not self._memory.moves and self._relief.evict(batch, lanes):
                missing = goal - self._memory.num_available

    def make_room(self, batch: PlanBuilder, num_needed: int, spared: Request) -> bool:
        """Rungs 3 to 6 of the pressure ladder: holes that are there already, then tokens that may die, then the latest
        request but `spared`. One step of it; false if there is nothing left to try."""
        lanes = self.lanes()
        if self._relief.reclaim(batch, lanes, num_needed - self._memory.num_available):
            return True
        evicts_first = self._config.on_pressure == "evict"
        if evicts_first and self._relief.evict(batch, lanes):
            return True
        victims = [request for request in self.running if request is not spared]
        if victims:
            self._send_away(victims[-1], batch)
            return True
        return not evicts_first and self._relief.evict(batch, lanes)

    def start_over(self, request: Request) -> bool:
        """A lone request needs a block, and its policy has not seen enough to say what may die: computed again, with
        blocks short from the start, it will have. False if that was tried at this length already, or cannot help."""
        lanes = np.array(request.lanes)
        length = int(self._memory.tokens.lengths[lanes].max())
        if request.retention is None or request.retention.trigger == "always" or length <= request.started_over_at:
            return False
        request.started_over_at = length
        self._send_away(request, None)
        return True

    def _send_away(self, request: Request, batch: PlanBuilder | None) -> None:
        """Rung 6."""
        available = self._memory.num_available
        self.preempt(request, batch)
        self._counters.preemptions_under_pressure += 1
        self._counters.blocks_by_preemption += self._memory.num_available - available

    def preempt(self, request: Request, batch: PlanBuilder | None) -> None:
        """Take a request's blocks, all of them: to the host if asked to and possible, else they are recomputed."""
        copy = None
        if batch is not None and self._wants_swap(request):
            copy = self._memory.swap_out(request.lanes)
            if copy is None:
                self._counters.swap_fallbacks += 1
            else:
                batch.add_copy(copy, [request])
        self._leave(request)
        if copy is not None:
            request.status = Status.SWAPPED
            self._counters.preemptions_swap += 1
        else:
            self.drop_lanes(request)
            request.status = Status.PREEMPTED
            self._counters.preemptions_recompute += 1
        request.num_preemptions += 1
        insort(self.preempted, request, key=lambda r: r.index)

    def _wants_swap(self, request: Request) -> bool:
        if self._config.preemption == "recompute" or request.unforked:
            return False
        lanes = np.array(request.lanes)
        if (self._state["total"][lanes] - self._memory.tokens.lengths[lanes] != 1).any():
            return False  # in the middle of its prompt: blocks that hold nothing yet would have to be found again
        if self._config.preemption == "swap":
            return True
        assert self._costs is not None
        num_tokens = int(self._memory.tokens.lengths[lanes].sum())
        return self._costs.prefers_swap(num_tokens, len(self._memory.swap_blocks(request.lanes)))

    def _enter(self, request: Request) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.preempted.remove(request)
        request.status = Status.RUNNING
        insort(self.running, request, key=lambda r: r.index)
        self.num_running += len(request.unfinished)
        self._lanes = None

    def _leave(self, request: Request) -> None:
        _take_out(self.running, request)
        self.num_running -= len(request.unfinished)
        self._lanes = None

    def drop_lanes(self, request: Request) -> None:
        """Forget where a request lies. What is needed to come back the same is kept: its tokens and their deaths."""
        for lane in request.lanes:
            sequence, computed = self._state.of(lane), int(self._state["computed"][lane])
            # A replay that was cut short again still has later deaths to come. Of a step that did not take place
            # nothing counts, what died at its end included.
            deaths = self._memory.tokens.died_at(lane).items()
            sequence.died_at |= {position: died for position, died in deaths if died <= computed}
            sequence.settled = max(int(self._state["settled"][lane]), computed)
            self._release(lane)
        request.unforked = request.unfinished[1:]
        if request.beam_search is not None:
            request.beam_search.withdraw()

    def _release(self, lane: int) -> None:
        self._state.close(lane)
        self._memory.release([lane])

    def remove(self, request: Request) -> None:
        """Take a request out, whichever queue it is in, and give back its blocks, wherever they are."""
        if request.status is Status.RUNNING:
            self._leave(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.preempted.remove(request)
        self.drop_lanes(request)
        self.is_blocked = False

    def purge(self, requests: Collection[Request]) -> None:
        """Take requests out after a fault in the middle of a change: nothing is taken for granted. Lanes that no
        sequence knows any more are left in the books."""
        self.running[:] = [request for request in self.running if request not in requests]
        self.preempted[:] = [request for request in self.preempted if request not in requests]
        for lane in [lane for request in requests for lane in request.lanes]:
            self._release(lane)
        self.num_running = sum(len(request.unfinished) for request in self.running)
        self._lanes = None
        self.is_blocked = False

    def close(self, sequence: Sequence) -> None:
        """A running sequence that has just finished gives its blocks back; its request goes with the last one."""
        assert sequence.lane is not None, "only a sequence that ran comes to an end by itself"
        sequence.died_at = self._memory.tokens.died_at(sequence.lane)
        self._release(sequence.lane)
        self.num_running -= 1
        self._lanes = None
        self.is_blocked = False
        if not sequence.request.unfinished:
            _take_out(self.running, sequence.request)


def _take_out(queue: list[Request], request: Request) -> None:
    """Remove a request from a queue in order of arrival, without comparing it with all that came before it."""
    place = bisect_left(queue, request.index, key=lambda r: r.index)
    assert queue[place] is request, "a request is in the queue that its status names"
    del queue[place]
