"""`Timeline`: what happens to texts on their way, at lengths that are known beforehand: deaths and forks.

A chunk is never computed past such a length (`cut`), so that everything that comes after it is computed without the
dead, and by each choice for itself.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.copy import Copy
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.config import SchedulerConfig, SchedulerCounters
from vtoken.schedule.evictor import Evictor
from vtoken.schedule.lane_state import NEVER, LaneState
from vtoken.schedule.sequence import Request, Sequence


class Timeline:
    """Leads sequences past the lengths at which something happens to them."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVCacheManager,
        state: LaneState,
        counters: SchedulerCounters,
        evictor: Evictor,
    ) -> None:
        self._packs = config.kv_mode == "vtoken"
        self._beside = config.kv_copies == "beside"
        self._memory = memory
        self._state = state
        self._counters = counters
        self._evictor = evictor
        self._copies: list[tuple[Copy, Request]] = []

    def take_copies(self) -> list[tuple[Copy, Request]]:
        """The copies that packing ordered since the last call; they belong to the next plan."""
        copies, self._copies = self._copies, []
        return copies

    def open(self, lane: int) -> None:
        """A sequence has got a lane and stands where the prefix cache has brought it."""
        length = int(self._memory.tokens.lengths[lane])
        self._state["computed"][lane] = length
        self._set_cut(lane, length)

    def reach(self, lanes: NDArray[np.int64]) -> dict[int, str]:
        """Distinct lanes have been computed up to where they stand. Whatever is due there happens: policies are asked,
        choices fork, recorded deaths are repeated. Returns the lanes whose policy failed, and why."""
        lengths, state = self._memory.tokens.lengths, self._state
        lanes = lanes[lengths[lanes] == state["cut"][lanes]]
        if not len(lanes):
            return {}
        at_place = lanes[lengths[lanes] == state["place"][lanes]]
        undecided = [lane for lane in at_place.tolist() if lengths[lane] > state.of(lane).settled]
        before = self._memory.counters.tokens_evicted
        failures = self._evictor.decide(np.array(undecided, np.int64))
        self._counters.tokens_evicted_at_places += self._memory.counters.tokens_evicted - before
        for lane in undecided:
            state.of(lane).settled = int(lengths[lane])
        repeated = set(at_place.tolist()) - set(undecided)
        for lane in repeated:
            self._repeat_common_deaths(state.of(lane), int(lengths[lane]))
        if len(at_place):
            self._give_back(at_place)  # before others share its blocks
        for lane in [*lanes.tolist(), *self._fork(lanes)]:
            sequence = state.of(lane)
            length = int(self._memory.tokens.lengths[lane])  # read anew: a fork may have made the tables larger
            # What a choice lost here it may have lost after the fork, so each loses its own again.
            if lane not in undecided and length <= sequence.settled:
                self._repeat_deaths(sequence, length)
            sequence.settled = max(sequence.settled, length)
            self._set_cut(lane, length + 1)
        return failures

    def _repeat_common_deaths(self, sequence: Sequence, length: int) -> None:
        """What all choices lost at the end of their prompt they lost before they forked, when its blocks could still be
        packed; so again."""
        choices = [sequence, *sequence.request.unforked]
        common = set.intersection(*({p for p, died in each.died_at.items() if died == length} for each in choices))
        if common and length <= sequence.settled:
            self.evict(sequence, sorted(common))

    def _repeat_deaths(self, sequence: Sequence, length: int) -> None:
        """A sequence that was recomputed loses its tokens where it had lost them; nobody is asked again."""
        lane = sequence.lane
        assert lane is not None, "a sequence without a lane has no live tokens"
        gone = self._memory.tokens.died_at(lane)  # with the leader, before the fork
        due = [position for position, died in sequence.died_at.items() if died == length and position not in gone]
        if due:
            self.evict(sequence, due)

    def evict(self, sequence: Sequence, positions: SequenceOf[int]) -> None:
        """Mark tokens of a running sequence dead."""
        assert sequence.lane is not None, "a sequence without a lane has no live tokens"
        rows = self._memory.tokens.rows_of(sequence.lane, positions)
        self._memory.evict(np.full(len(rows), sequence.lane), rows)

    def _give_back(self, lanes: NDArray[np.int64]) -> None:
        """Tokens have died: what the tokens up to the next place will not need is returned."""
        spare = np.array([self._spare_cells(lane) for lane in lanes.tolist()], np.int64)
        reclaimed = self._memory.reclaim(
            lanes, spare_cells=spare, compact=self._packs, beside=self._beside, trigger="place"
        )
        self._copies += [(copy, self._state.of(lane).request) for lane, copy in reclaimed.copies]

    def _spare_cells(self, lane: int) -> int:
        """What a sequence will need before its next place: holes are for new tokens, not for copies."""
        request, length = self._state.of(lane).request, int(self._memory.tokens.lengths[lane])
        retention, prompt = request.retention, request.num_prompt_tokens
        assert retention is not None, "only who loses tokens has places"
        if retention.trigger != "always" and length >= prompt:
            return 1
        return self._next_place(lane) - length

    def _next_place(self, lane: int) -> int:
        request, tokens = self._state.of(lane).request, self._memory.tokens
        assert request.retention is not None, "only who loses tokens has places"
        length, num_live = int(tokens.lengths[lane]), int(tokens.num_live[lane])
        return min(request.retention.next_place(length, num_live, request.num_prompt_tokens), NEVER)

    def _set_cut(self, lane: int, first: int) -> None:
        """The next length, from `first` on, at which something is to happen to a sequence: a recorded death, a
        decision, or its choices fork."""
        sequence, state, tokens = self._state.of(lane), self._state, self._memory.tokens
        request, length = sequence.request, int(tokens.lengths[lane])
        place = NEVER
        if state["at_places"][lane]:
            retention = request.retention
            assert retention is not None, "only who loses tokens has places"
            if retention.trigger == "always" or length < request.num_prompt_tokens:
                place = self._next_place(lane)
            else:
                state["at_places"][lane] = False  # a tight prompt is over; from here on blocks decide
        state["place"][lane] = place
        cuts = [died for died in sequence.died_at.values() if died >= first]
        if request.unforked:
            cuts.append(request.num_prompt_tokens)
        if request.started_over_at > length:
            cuts.append(request.started_over_at)  # a policy is asked there that had not seen enough the first time
        state["cut"][lane] = min([place, *cuts])

    def _fork(self, lanes: NDArray[np.int64]) -> list[int]:
        """Leaders that have computed their prompt are joined by the other choices, whose lanes are returned."""
        memory, state = self._memory, self._state
        at_prompt = memory.tokens.lengths[lanes] == state["prompt"][lanes]
        twins = []
        for lane in lanes[at_prompt & (state["num_unforked"][lanes] > 0)].tolist():
            leader = state.of(lane)
            choices, leader.request.unforked = leader.request.unforked, []
            state["num_unforked"][lane] = 0
            for choice in choices:
                twin = memory.fork(lane)
                if not choice.token_ids:
                    choice.token_ids = list(leader.request.prompt_token_ids)
                    choice.hashes = leader.hashes.copy(leader.request.num_prompt_tokens)
                state.open(twin, choice, int(state["limit"][lane]))
                self._evictor.open(twin, choice)
                for known in ("scanned", "observed", "missed"):
                    state[known][twin] = state[known][lane]
                state["computed"][twin] = memory.tokens.lengths[lane]
                twins.append(twin)
        return twins
