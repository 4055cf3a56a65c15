"""`Residents`: which requests have blocks and which wait for them; how they come in, give way and come back."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from vtoken.base.clock import Clock
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.batch import PlanBuilder
from vtoken.schedule.config import SchedulerConfig, SchedulerCounters
from vtoken.schedule.lane_state import NEVER, LaneState
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.sequence import Request, Sequence, Status


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
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.num_running = 0  # sequences of running requests, those still to fork included
        self.is_blocked = False  # the head of the queue waits for blocks
        self._config = config
        self._memory = memory
        self._state = state
        self._counters = counters
        self._clock = clock
        self._costs = costs
        self._lanes: NDArray[np.int64] | None = None  # of the running requests; None when out of date

    def lanes(self) -> NDArray[np.int64]:
        """Of the running requests; ascending, so that neighbours in the tables are neighbours in the plan."""
        if self._lanes is None:
            self._lanes = np.sort(np.array([lane for request in self.running for lane in request.lanes], np.int64))
        return self._lanes

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.is_blocked = False

    # --- coming in, going out ---------------------------------------------------------------------------------------

    def admit(self, batch: PlanBuilder) -> None:
        """First come, first served; while the head waits for blocks, at most `max_passes` others may pass it."""
        tried = 0  # requests at the front of the queue for which there are no blocks
        while tried < len(self.waiting):
            request, head = self.waiting[tried], self.waiting[0]
            # `tried` counts too: it bounds the search, not only the passing.
            if tried and head.num_passes + tried > self._config.max_passes:
                break
            if batch.tokens_left < 1 or self.num_running + request.params.n > self._config.max_num_seqs:
                break
            if not self._start(request, batch):
                tried += 1
            elif tried:
                head.num_passes += 1
        self.is_blocked = tried > 0

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

    def _swap_in(self, request: Request, batch: PlanBuilder) -> bool:
        lanes = request.lanes
        # A block each to go on with, or it would be the first to be preempted again; alone it needs no such care.
        spare = self._spare() + len(lanes) if self.running else 0
        if len(self._memory.swap_blocks(lanes)) + spare > self._memory.num_available:
            return False
        copy = self._memory.swap_in(lanes)
        assert copy is not None, "there were enough blocks a moment ago"
        batch.add_copy(copy, [request])
        self._enter(request)
        self.replay_deaths(np.array(lanes))  # it may have been preempted just where something was to happen
        counts = np.ones(len(lanes), np.int64)
        placement = self._memory.plan_extend(np.array(lanes), counts)
        if placement.num_blocks <= self._memory.num_available:
            batch.add_slices(np.array(lanes), counts, self._memory.extend(placement))
        return True

    def _start(self, request: Request, batch: PlanBuilder) -> bool:
        """Give a request its blocks, all that its known text needs or none, and its first tokens of the step."""
        memory, leader = self._memory, request.leader
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
        spare = self._spare() if request.status is Status.PREEMPTED else 0
        if memory.blocks_to_admit(reserve, matched) + later + spare > memory.num_available:
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
        self.replay_deaths(np.array([lane]))
        need = min(len(leader.token_ids), int(self._state["cut"][lane])) - int(memory.tokens.lengths[lane])
        lanes, counts = np.array([lane]), np.array([min(need, batch.tokens_left)])
        batch.add_slices(lanes, counts, memory.extend(memory.plan_extend(lanes, counts)))
        return True

    def make_room(self, batch: PlanBuilder, num_needed: int, spared: Request) -> bool:
        """Rungs 4 and 6 of the pressure ladder: holes that are there already, then the latest request but `spared`.

        One step of it; false if there is nothing left to try.
        """
        if self._reclaim_holes(batch, num_needed):
            return True
        victims = [request for request in self.running if request is not spared]
        if victims:
            self.preempt(victims[-1], batch)
        return bool(victims)

    def _reclaim_holes(self, batch: PlanBuilder, num_needed: int) -> bool:
        memory = self._memory
        lanes = self.lanes()
        returned = 0
        for lane in lanes[memory.tokens.evicted[lanes]].tolist():
            copy, num_returned = memory.reclaim(lane, spare_cells=1)
            returned += num_returned
            if copy is not None:
                batch.add_copy(copy, [self._state.of(lane).request])
            if memory.num_available >= num_needed:
                break
        return returned > 0

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
            sequence = self._state.of(lane)
            # A replay that was cut short again still has later deaths to come.
            sequence.died_at |= self._memory.tokens.died_at(lane)
            self._release(lane)
        request.unforked = request.unfinished[1:]

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

    # --- what happens to a text on its way: deaths and forks --------------------------------------------------------

    def evict(self, sequence: Sequence, positions: SequenceOf[int]) -> None:
        """Mark tokens of a running sequence dead."""
        assert sequence.lane is not None, "a sequence without a lane has no live tokens"
        rows = self._memory.tokens.rows_of(sequence.lane, positions)
        self._memory.evict(np.full(len(rows), sequence.lane), rows)

    def replay_deaths(self, lanes: NDArray[np.int64]) -> None:
        """Sequences that were recomputed lose their tokens again where they had lost them; nobody is asked again."""
        lengths = self._memory.tokens.lengths
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

    def fork_choices(self, lanes: NDArray[np.int32]) -> None:
        """Leaders that have computed their prompt are joined by the other choices."""
        memory = self._memory
        at_prompt = memory.tokens.lengths[lanes] == self._state["prompt"][lanes]
        for lane in lanes[at_prompt].tolist():
            leader = self._state.of(lane)
            choices, leader.request.unforked = leader.request.unforked, []
            self._state["num_unforked"][lane] = 0
            for choice in choices:
                twin = memory.fork(lane)
                if not choice.token_ids:
                    choice.token_ids = list(leader.request.prompt_token_ids)
                    choice.hashes = leader.hashes.copy(leader.request.num_prompt_tokens)
                self._state.open(twin, choice, int(self._state["limit"][lane]))
                self._set_cut(twin, choice.request.num_prompt_tokens)
                self._lanes = None
            self._set_cut(lane, leader.request.num_prompt_tokens)


def _take_out(queue: list[Request], request: Request) -> None:
    """Remove a request from a queue in order of arrival, without comparing it with all that came before it."""
    place = bisect_left(queue, request.index, key=lambda r: r.index)
    assert queue[place] is request, "a request is in the queue that its status names"
    del queue[place]


def _peak_live(died_at: dict[int, int], length: int) -> int:
    """Most tokens live at once while `length` tokens are computed and die as recorded."""
    peak, dead = 0, 0
    for died, count in sorted(Counter(died_at.values()).items()):
        if died > length:
            break
        peak = max(peak, died - dead)
        dead += count
    return max(peak, length - dead)
