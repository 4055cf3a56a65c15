"""`Residents`: which requests have blocks and which wait for them; how they come in, give way and come back."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vtoken.base.clock import Clock
from vtoken.base.errors import InvariantError
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.prefix_cache import PrefixEntry
from vtoken.schedule.batch import PlanBuilder
from vtoken.schedule.config import SchedulerConfig, SchedulerCounters
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

    def _spare(self) -> int:
        """Blocks left to those who run when a preempted one comes back: one each, or it would soon have to go."""
        return len(self.running)

    def _blocks_to_swap_in(self, request: Request) -> int:
        # A block each to go on with, or it would be the first to be preempted again; alone it needs no such care.
        spare = self._spare() + len(request.lanes) if self.running else 0
        return len(self._memory.swap_blocks(request.lanes)) + spare

    def _swap_in(self, request: Request, batch: PlanBuilder) -> bool:
        lanes = request.lanes
        if self._blocks_to_swap_in(request) > self._memory.num_available:
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
        matched = self._match(request)
        if self._missing_to_start(request, matched) > 0:
            if not self._can_be_tight(request):
                return False
            request.is_tight = True  # its own tokens are the first that it gives up
            matched = self._match(request)
            if self._missing_to_start(request, matched) > 0:
                request.is_tight = False
                return False
        lane = memory.admit(self._reserve(request, matched), matched)
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

    def _match(self, request: Request) -> list[PrefixEntry]:
        """The cached blocks that a request can begin with."""
        leader, goal = request.leader, _tokens_to_start(request)
        leader.hashes.extend(leader.token_ids, goal)
        # One token is always left to compute, and what follows a death was computed without the dead.
        limits = [goal - 1, *leader.died_at.values()]
        if request.retention is not None:
            # What is cached would have to lie there at once, before any of it can die.
            limits += [request.retention.most_matched(request.num_prompt_tokens), self._peak(request)]
            if request.started_over_at >= leader.settled > 0:
                limits.append(0)  # it is computed again for what its policy did not see
        if request.prompt_scores is not None:
            limits.append(0)  # only what is computed can be scored
        return self._memory.match(leader.hashes, max(0, min(limits)))

    def _reserve(self, request: Request, matched: list[PrefixEntry]) -> int:
        """Tokens for which a request needs blocks until its known text is computed: cells that die in blocks of others
        are not its own to use again. Others may come to share its blocks later: then the ladder has to help."""
        num_shared = sum(bool(self._memory.pool.refs[entry.block]) for entry in matched)
        return min(_tokens_to_start(request), self._peak(request) + num_shared * self._memory.block_size)

    def _peak(self, request: Request) -> int:
        """Tokens of a request that live at once, at most, until its known text is computed."""
        leader, retention, goal = request.leader, request.retention, _tokens_to_start(request)
        peak = _peak_live(leader.died_at, goal)
        if retention is None or self._config.kv_mode != "vtoken":
            return peak
        if request.is_tight or retention.trigger == "always":
            # What is settled dies as recorded; from there on the places decide.
            coming = [retention.peak_in_prompt(request.num_prompt_tokens)]
            if goal > request.num_prompt_tokens:
                coming.append(retention.peak_after_prompt(goal))
            return min(peak, max(_peak_live(leader.died_at, min(goal, leader.settled)), *coming))
        if request.started_over_at >= leader.settled > 0:
            return min(peak, leader.settled)  # there its policy will be asked
        return peak

    def _missing_to_start(self, request: Request, matched: list[PrefixEntry]) -> int:
        """Blocks that are missing for a request to start; 0 or less: it can."""
        memory, reserve = self._memory, self._reserve(request, matched)
        needed = memory.blocks_to_admit(reserve, matched)
        if request.status is Status.PREEMPTED and self.running:  # alone it has the whole pool
            if request.unforked:
                needed += max(0, self._blocks_after_fork(request) - -(-reserve // memory.block_size))
            needed += self._spare()
        return needed - memory.num_available

    def _blocks_after_fork(self, request: Request) -> int:
        """Blocks, at most, that choices hold together when each has computed its known answer again."""
        size, prompt, choices = self._memory.block_size, request.num_prompt_tokens, request.unfinished
        shared = prompt // size
        lengths = [max(prompt, len(choice.token_ids)) for choice in choices]  # who never forked has none yet
        whole = shared + sum(-(-length // size) - shared for length in lengths)
        retention = request.retention
        if retention is None or self._config.kv_mode != "vtoken":
            return whole
        peaks = [_peak_live(choice.died_at, length, prompt) for choice, length in zip(choices, lengths, strict=True)]
        if retention.trigger == "always":
            peaks = [min(peak, retention.peak_after_prompt(n)) for peak, n in zip(peaks, lengths, strict=True)]
        # Those that live in the prompt may lie in blocks that all share, besides.
        return min(whole, shared + sum(-(-peak // size) for peak in peaks))

    def _can_be_tight(self, request: Request) -> bool:
        """Whether a prompt may be cut at fixed places because its blocks are not there. Only one that never ran: what
        was settled without it cannot be repeated in fewer blocks."""
        retention = request.retention
        return (
            retention is not None
            and self._config.kv_mode == "vtoken"
            and (self._config.admission_evicts or not self.running)
            and retention.trigger == "pressure"
            and request.leader.settled == 0
            and not request.is_tight
        )

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
            missing = self._blocks_to_swap_in(first) - self._memory.num_available
        else:
            missing = self._missing_to_start(first, self._match(first))
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


def _tokens_to_start(request: Request) -> int:
    """Tokens that the leader computes before the other choices join it, or all that are known."""
    return request.num_prompt_tokens if request.unforked else len(request.leader.token_ids)


def _take_out(queue: list[Request], request: Request) -> None:
    """Remove a request from a queue in order of arrival, without comparing it with all that came before it."""
    place = bisect_left(queue, request.index, key=lambda r: r.index)
    assert queue[place] is request, "a request is in the queue that its status names"
    del queue[place]


def _peak_live(died_at: dict[int, int], length: int, first: int = 0) -> int:
    """Most tokens live at once while a text grows to `length` tokens, which die as recorded, once it has `first`."""
    peak, dead = 0, 0
    for died, count in sorted(Counter(died_at.values()).items()):
        if died > length:
            break
        if died > first:
            peak = max(peak, died - dead)
        dead += count
    return max(peak, length - dead)
