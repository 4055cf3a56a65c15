"""`DecisionLog`: what was decided about winning blocks back, one record a decision, and what came of it when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

Verdict = Literal["packed", "dead_blocks", "no_gain", "too_dear"]
Phase = Literal["plan", "copy", "return", "drop"]


@dataclass(frozen=True)
class ReclaimDecision:
    """One decision: what it was asked, what it weighed, what came of it.

    Cost and value are in tokens: times the bytes a token takes in all layers they are the bytes to copy and the bytes
    of memory that come back. They are those of the plan carried out or, where the verdict is `too_dear`, of the plan
    turned down.

    Verdicts: `packed` (live tokens were moved together), `dead_blocks` (only blocks without a live token came back, at
    no cost), `no_gain` (no block could come back), `too_dear` (some could, but for more copies a block than allowed).
    """

    number: int  # 0, 1, ... in the order they were made
    step: int  # of the scheduler, see `DecisionLog.step`
    trigger: str  # why somebody asked
    num_lanes: int  # sequences looked at
    blocks_wanted: int | None  # None: all that can come back
    blocks_returned: int  # with copies beside the steps: those to come when the copies have ended included
    tokens_copied: int
    cost: int  # tokens to copy
    value: int  # cells that come back: blocks times block_size
    verdict: Verdict


@dataclass(frozen=True)
class ReclaimEvent:
    """A decision has come to one of its phases.

    `plan`: it was made; `tokens` and `blocks` are what it copies and brings back. `copy`: a copy of a lane's `tokens`
    was ordered, which nothing reads yet. `return`: the map is switched, so that the copies, if there were any, are what
    is read from now on, and the emptied `blocks` are the pool's again. `drop`: a copy beside the steps has failed, or
    its sequence had gone when it ended: no map is switched.
    """

    step: int  # of the scheduler, see `DecisionLog.step`
    decision: int  # its number
    phase: Phase
    lane: int | None  # whose tokens; None = of all lanes that the decision is about
    tokens: int
    blocks: int


class DecisionLog:
    """The latest decisions and events, the oldest first, and how many decisions there were of each verdict, which only
    grow in number. An event's decision may be older than those still kept."""

    def __init__(self, capacity: int = 1000) -> None:
        if capacity < 1:
            raise ValueError(f"a decision log holds at least 1 decision, got {capacity}")
        self.step = 0  # what comes next is stamped with it: the step that carries the copies. The scheduler sets it
        self.counts: dict[Verdict, int] = dict.fromkeys(get_args(Verdict), 0)
        self.num_events = 0  # all there were
        self._latest: deque[ReclaimDecision] = deque(maxlen=capacity)
        self._events: deque[ReclaimEvent] = deque(maxlen=4 * capacity)

    @property
    def num_decisions(self) -> int:
        """All there were: the number of the next one."""
        return sum(self.counts.values())

    def add(self, decision: ReclaimDecision) -> None:
        self._latest.append(decision)
        self.counts[decision.verdict] += 1
        self.enter(decision.number, "plan", tokens=decision.tokens_copied, blocks=decision.blocks_returned)

    def enter(self, decision: int, phase: Phase, *, lane: int | None = None, tokens: int = 0, blocks: int = 0) -> None:
        """A decision, by its number, has come to a phase."""
        self._events.append(ReclaimEvent(self.step, decision, phase, lane, tokens, blocks))
        self.num_events += 1

    @property
    def events(self) -> tuple[ReclaimEvent, ...]:
        return tuple(self._events)

    def last_events(self, count: int) -> list[ReclaimEvent]:
        """The last `count` events, or as many as are kept, the oldest first."""
        return list(islice(reversed(self._events), count))[::-1]

    def find(self, number: int) -> ReclaimDecision | None:
        """A decision by its number; None for one that is kept no longer."""
        first = self._latest[0].number if self._latest else 0
        return self._latest[number - first] if first <= number < first + len(self._latest) else None

    def __len__(self) -> int:
        return len(self._latest)

    def __iter__(self) -> Iterator[ReclaimDecision]:
        return iter(self._latest)

    @property
    def latest(self) -> ReclaimDecision | None:
        return self._latest[-1] if self._latest else None
