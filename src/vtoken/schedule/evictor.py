"""`Evictor`: asks the policies which tokens die, and sees to it that they know what they need to know."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.base.errors import VtokenError, describe
from vtoken.memory.bits import Ints
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.statistics import AttentionStatistic, CacheStatistic, FutureAttention, Statistic
from vtoken.policies.victims import checked_scores, choose_victims, protection
from vtoken.schedule.config import SchedulerCounters
from vtoken.schedule.lane_state import NEVER, LaneState
from vtoken.schedule.plan import StatisticOrder, StepPlan, StepResult
from vtoken.schedule.sequence import Request, Sequence

Lanes = NDArray[np.int64]
# (slices, whether each wants it, from which position on, whether now)
_Part = tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64], NDArray[np.bool_]]

# Who acts under pressure is told nothing while blocks are plenty, so that it costs nothing: attention is gathered, and
# the cache read at each stride, while blocks are getting short. Nobody knows when a decision comes then, so the "last w
# queries" are those since the last multiple of w; before them each w queries count half as much as those after them.
FADE = 0.5

MANY = 32  # policies from which on those that nobody runs under are forgotten, their statistics too


@dataclass(frozen=True)
class Judgement:
    """What a policy thinks of the live tokens of one sequence, in order of position."""

    positions: NDArray[np.int32]  # [tokens]
    scores: NDArray[np.float64]  # [tokens] the lowest die first; NaN where nobody has looked yet
    is_protected: NDArray[np.bool_]  # [tokens] may not die: first, recent or pinned ones


class Evictor:
    """Policies of the running sequences, filed by number, and the statistics that they are to be given."""

    def __init__(self, memory: KVCacheManager, state: LaneState, counters: SchedulerCounters) -> None:
        self.policies: list[Policy] = []
        self.is_near = False  # blocks are getting short, so that it may soon be asked
        self._failed: dict[Request, str] = {}  # whose policy failed when blocks were short, and why
        self._columns: set[str] = set()  # statistics that are kept for policies
        self._memory = memory
        self._state = state
        self._counters = counters

    def open(self, lane: int, sequence: Sequence) -> None:
        """A sequence has got a lane."""
        retention = sequence.request.retention
        if retention is None:
            return
        if retention.policy not in self.policies:
            self._add(retention.policy, lane)
        state, is_share = self._state, isinstance(retention.budget, float)
        state["policy"][lane] = self.policies.index(retention.policy)
        state["budget"][lane] = 0 if is_share else retention.budget
        state["share"][lane] = retention.budget if is_share else 0.0
        state["stride"][lane] = retention.stride
        state["missed"][lane] = self._memory.tokens.lengths[lane]  # nobody gathered what the cached ones looked at
        state["at_places"][lane] = retention.trigger == "always" or sequence.request.is_tight

    def _add(self, policy: Policy, lane: int) -> None:
        """File a policy under a number of its own; `lane` is about to run under it."""
        tokens = self._memory.tokens
        if len(self.policies) < MANY:
            self.policies.append(policy)
        else:
            others = [other for other in self._memory.used_lanes if other != lane]
            unused = sorted(set(range(len(self.policies))) - set(self._state["policy"][others].tolist()))
            for number in unused:  # all of them, so that no other keeps its statistics
                self.policies[number] = policy
            if not unused:
                self.policies.append(policy)
            needed = {statistic.name for each in self.policies for statistic in each.needs}
            tokens.drop_columns(self._columns - needed)
            self._columns &= needed
        self._columns |= {statistic.name for statistic in policy.needs}
        for statistic in policy.needs:
            tokens.add_column(statistic.name, np.nan if isinstance(statistic, CacheStatistic) else 0.0)

    # --- statistics ---------------------------------------------------------------------------------------------------

    def order(self, lanes: Lanes, counts: NDArray[np.int64]) -> tuple[StatisticOrder, ...]:
        """What the slices of a plan are to find out: slice i brings `counts[i]` new tokens to `lanes[i]`, whose cells
        the books have given out already."""
        policies = self._state["policy"][lanes]
        if not (policies >= 0).any():
            return ()
        self._state["observed" if self.is_near else "missed"][lanes] += counts.astype(np.int32)
        ends = self._memory.tokens.lengths[lanes].astype(np.int64)
        begins = ends - counts
        found: dict[Statistic, list[_Part]] = defaultdict(list)
        for index in np.unique(policies[policies >= 0]).tolist():
            slices = np.flatnonzero(policies == index)
            for statistic in self.policies[index].needs:
                part = self._order(statistic, lanes[slices], begins[slices], ends[slices])
                found[statistic].append((slices, *part))
        return tuple(order for statistic, parts in found.items() if (order := self._join(statistic, parts, lanes)))

    def _join(self, statistic: Statistic, parts: list[_Part], lanes: Lanes) -> StatisticOrder | None:
        slices, wanted, first, due = map(np.concatenate, zip(*parts, strict=True))
        kept = np.argsort(slices)
        kept = kept[wanted[kept]]
        if not len(kept):
            return None
        if not isinstance(statistic, FutureAttention):
            return StatisticOrder(statistic, slices[kept].astype(np.int32), first[kept])
        owners = np.array([self._state.of(lane).number for lane in lanes[slices[kept]].tolist()], np.int64)
        return StatisticOrder(statistic, slices[kept].astype(np.int32), first[kept], owners, due[kept])

    def _order(
        self, statistic: Statistic, lanes: Lanes, begins: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.bool_]]:
        """Whether each lane wants it, from which position on, and whether now; see `StatisticOrder`. Starts windows
        anew."""
        state = self._state
        at_places, places = state["at_places"][lanes], state["place"][lanes].astype(np.int64)
        if isinstance(statistic, CacheStatistic):
            # Without a place it is read at each stride while blocks are short: a decision is one stride late then.
            strides, scanned = state["stride"][lanes], state["scanned"][lanes]
            is_time = (ends // strides > begins // strides) | (scanned == 0)
            due = np.where(at_places, ends == places, self.is_near & is_time)
            # Queries are remembered up to the decision.
            wanted = due
            if isinstance(statistic, FutureAttention):  # which remembers queries from step to step
                wanted = due | np.where(at_places, ends > places - statistic.window, self.is_near)
            return wanted, scanned.astype(np.int64), due
        assert isinstance(statistic, AttentionStatistic)
        always = np.ones(len(lanes), np.bool_)
        wanted = at_places | self.is_near
        window = statistic.last
        if window is None:
            return wanted, begins, always
        starts = np.where(at_places, places - window, (ends - 1) // window * window)
        wanted &= ends > starts
        is_new = wanted & (begins <= starts)
        if is_new.any():
            factors = np.where(at_places[is_new] | (window == 1), 0.0, FADE)
            self._memory.tokens.fade_statistics(statistic.name, lanes[is_new], factors)
        return wanted, np.maximum(begins, starts), always

    def enter(self, plan: StepPlan, result: StepResult) -> None:
        """Put what a step has found out into the columns of the books."""
        tokens = self._memory.tokens
        for order in plan.statistics:
            lanes, values = plan.lanes[order.slices], result.statistics[order.statistic.name]
            if isinstance(order.statistic, AttentionStatistic):
                tokens.add_statistics(order.statistic.name, lanes, values)
                continue
            tokens.replace_statistics(order.statistic.name, lanes, values)
            due = slice(None) if order.due is None else order.due
            self._state["scanned"][lanes[due]] = tokens.lengths[lanes[due]]

    def is_ready(self, lanes: Lanes) -> NDArray[np.bool_]:
        """Whether the policy of each lane has seen enough to decide under pressure: the attention of a window or, if it
        has none or a longer one, of a stride, or of all queries; and what lies in the cache."""
        state = self._state
        ready = np.ones(len(lanes), np.bool_)
        for index in np.unique(state["policy"][lanes]).tolist():
            policy, some = self.policies[index], state["policy"][lanes] == index
            if any(isinstance(need, AttentionStatistic) for need in policy.needs):
                enough = np.minimum(policy.window or NEVER, state["stride"][lanes[some]])
                ready[some] &= (state["observed"][lanes[some]] >= enough) | (state["missed"][lanes[some]] == 0)
            if any(isinstance(need, CacheStatistic) for need in policy.needs):
                ready[some] &= state["scanned"][lanes[some]] > 0
        return ready

    # --- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, lanes: Lanes) -> dict[int, str]:
        """Bring distinct lanes that are at a place down to their budgets. Returns whose policy failed, and why."""
        state, tokens = self._state, self._memory.tokens
        surplus = tokens.num_live[lanes] - state.budgets(lanes, tokens.lengths[lanes])
        lanes, surplus = lanes[surplus > 0], surplus[surplus > 0]
        failures: dict[int, str] = {}
        for index in np.unique(state["policy"][lanes]).tolist():
            some = state["policy"][lanes] == index
            _, failed = self._kill(self.policies[index], lanes[some], surplus[some])
            failures |= failed
        return failures

    def kill(self, lane: int, count: int, candidates: NDArray[np.bool_]) -> int:
        """Let `count` tokens of a lane die, in rows that are `candidates` [rows]. Returns how many did."""
        policy = self.policies[int(self._state["policy"][lane])]
        killed, failed = self._kill(policy, np.array([lane]), np.array([count]), candidates)
        self._failed |= {self._state.of(failing).request: reason for failing, reason in failed.items()}
        return killed

    def take_failed(self) -> dict[Request, str]:
        """The requests whose policy failed in `kill` since the last call, and why."""
        failed, self._failed = self._failed, {}
        return failed

    def _kill(
        self, policy: Policy, lanes: Lanes, counts: Ints, candidates: NDArray[np.bool_] | None = None
    ) -> tuple[int, dict[int, str]]:
        """Returns the number of tokens that died, and the lanes on which the policy failed."""
        if not len(lanes):
            return 0, {}
        memory = self._memory
        rows, positions, is_live = memory.tokens.live_by_position(lanes)
        try:
            view = self._view(policy, lanes, rows, positions, is_live)
            protected = protection(policy, view, [self._pins(lane) for lane in lanes.tolist()])
            # What the cache was not asked about yet is too young to be judged.
            for statistic in policy.needs:
                protected |= np.isnan(view[statistic])
            if candidates is not None:
                protected |= ~candidates[rows]
            victims = choose_victims(policy, view, protected, counts)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a policy may be anybody's; one that exits ends its request, not the engine
            if len(lanes) == 1:
                reason = str(error) if isinstance(error, VtokenError) else f"kv_policy {policy.name}: {describe(error)}"
                return 0, {int(lanes[0]): reason}
            parts = [self._kill(policy, lanes[i : i + 1], counts[i : i + 1], candidates) for i in range(len(lanes))]
            return sum(n for n, _ in parts), {lane: why for _, failed in parts for lane, why in failed.items()}
        of_lane, column = np.nonzero(victims)
        memory.evict(lanes[of_lane], rows[of_lane, column])
        return len(of_lane), {}

    def judge(self, lane: int) -> Judgement | None:
        """What a lane's policy thinks of its tokens now, for who watches; None if it keeps all, has not seen enough, or
        fails: an error counts when something is to die. Changes nothing."""
        number, lanes = int(self._state["policy"][lane]), np.array([lane])
        # For whoever loses tokens at places statistics are always gathered.
        if number < 0 or not (self._state["at_places"][lane] or self.is_ready(lanes)[0]):
            return None
        policy = self.policies[number]
        rows, positions, is_live = self._memory.tokens.live_by_position(lanes)
        try:
            view = self._view(policy, lanes, rows, positions, is_live)
            protected = protection(policy, view, [self._pins(lane)])
            is_known = is_live.copy()
            for statistic in policy.needs:
                is_known &= ~np.isnan(view[statistic])
            scores = np.where(is_known, checked_scores(policy, view, is_known), np.nan)
        except KeyboardInterrupt:
            raise
        except BaseException:  # a policy may be anybody's
            return None
        return Judgement(positions[0], scores[0], protected[0])

    def _pins(self, lane: int) -> tuple[tuple[int, int], ...]:
        retention = self._state.of(lane).request.retention
        assert retention is not None, "only who has a policy is asked"
        return retention.pins

    def _view(
        self,
        policy: Policy,
        lanes: Lanes,
        rows: NDArray[np.int64],
        positions: NDArray[np.int32],
        is_live: NDArray[np.bool_],
    ) -> TokenView:
        tokens = self._memory.tokens
        lengths = tokens.lengths[lanes]
        return TokenView(
            positions=positions,
            is_live=is_live,
            blocks=positions // self._memory.block_size,
            num_live=tokens.num_live[lanes],
            lengths=lengths,
            budgets=self._state.budgets(lanes, lengths),
            statistics={
                need.name: tokens.columns[need.name][lanes[:, None], rows].astype(np.float64) for need in policy.needs
            },
        )
