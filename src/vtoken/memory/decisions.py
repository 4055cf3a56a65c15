"""`DecisionLog`: what was decided about winning blocks back, one record a decision."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal["packed", "dead_blocks", "no_gain", "too_dear"]


@dataclass(frozen=True)
class ReclaimDecision:
    """One decision: what it was asked, what it weighed, what came of it.

    Cost and value are in tokens: times the bytes a token takes in all layers they are the bytes to copy and the bytes
    of memory that come back. They are those of the plan carried out or, where the verdict is `too_dear`, of the plan
    turned down.

    Verdicts: `packed` (live tokens were moved together), `dead_blocks` (only blocks without a live token came back, at
    no cost), `no_gain` (no block could come back), `too_dear` (some could, but for more copies a block than allowed).
    """

    step: int  # of the scheduler, see `DecisionLog.step`
    trigger: str  # why somebody asked
    num_lanes: int  # sequences looked at
    blocks_wanted: int | None  # None: all that can come back
    blocks_returned: int  # with copies beside the steps: those to come when the copies have ended included
    tokens_copied: int
    cost: int  # tokens to copy
    value: int  # cells that come back: blocks times block_size
    verdict: Verdict


class DecisionLog:
    """The latest decisions, the oldest first, and how many there were of each verdict: those counts only grow."""

    def __init__(self, capacity: int = 1000) -> None:
        if capacity < 1:
            raise ValueError(f"a decision log holds at least 1 decision, got {capacity}")
        self.step = 0  # what the next decisions are stamped with; whoever counts steps sets it
        self.counts: dict[Verdict, int] = dict.fromkeys(get_args(Verdict), 0)
        self._latest: deque[ReclaimDecision] = deque(maxlen=capacity)

    def add(self, decision: ReclaimDecision) -> None:
        self._latest.append(decision)
        self.counts[decision.verdict] += 1

    def __len__(self) -> int:
        return len(self._latest)

    def __iter__(self) -> Iterator[ReclaimDecision]:
        return iter(self._latest)

    @property
    def latest(self) -> ReclaimDecision | None:
        return self._latest[-1] if self._latest else None
