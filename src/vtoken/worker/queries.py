"""`QueryMemory`: the last queries of sequences, for statistics that look back on them.

Queries are not cached as keys are. So while slices are computed whose queries may count for FutureAttention, a copy of
them is kept, by lane and for as many tokens as the statistic looks at, before they are turned to their positions. A
window of 128 queries of the 135M model takes 9 MB.

What a lane knows goes on from slice to slice. It begins anew where a slice is of another sequence than the one before,
or does not join on to it. So after a preemption by recompute it comes back as it was, a swapped sequence keeps it, and
a forked one starts from nothing: queries before the fork count for the sequence that computed them alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vtoken.models.spec import ModelSpec
from vtoken.policies.statistics import FutureAttention
from vtoken.schedule.plan import StatisticOrder, StepPlan


@dataclass(eq=False)
class _Window:
    """Of one lane. The query of position `p` in [begin, end) lies at `p % window`."""

    owner: int
    queries: Tensor  # [num_layers, window, num_heads * head_dim] float32
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.queries.shape[1]

    def put(self, start: int, end: int, queries: Tensor) -> None:
        """Those of the last tokens of a slice at positions [start, end): [num_layers, at most window, ...]."""
        if not self.begin <= start <= self.end:
            self.begin = start
        self.begin = max(self.begin, end - self.size)
        self.end = end
        places = torch.arange(end - queries.shape[1], end) % self.size
        self.queries.index_copy_(1, places, queries)


class QueryStep:
    """The queries of one step, while they are computed."""

    def __init__(self, memory: QueryMemory, plan: StepPlan, orders: list[StatisticOrder]) -> None:
        self._memory = memory
        self._plan = plan
        self._orders = orders
        ends = plan.starts[1:]
        # Of each slice ordered as many as the longest window has room for: flat tokens [begin, end).
        self._begins = ends.copy()
        for order in orders:
            longest = np.maximum(plan.starts[order.slices], ends[order.slices] - _window(order))
            self._begins[order.slices] = np.minimum(self._begins[order.slices], longest)
        counts = ends - self._begins
        self._offsets = np.concatenate(([0], np.cumsum(counts)))  # [S + 1] where each slice's begin in `_taken`
        flat = [np.arange(begin, end) for begin, end in zip(self._begins.tolist(), ends.tolist(), strict=True)]
        self._tokens = torch.from_numpy(np.concatenate(flat).astype(np.int64))
        self._taken = torch.empty(memory.num_layers, len(self._tokens), memory.width)

    def take(self, layer: int, qkv: Tensor) -> None:
        """qkv [T, width and more] as the projection left it."""
        self._taken[layer] = qkv[:, : self._taken.shape[2]].index_select(0, self._tokens)

    def commit(self) -> None:
        """Once all layers have been computed."""
        plan, seen = self._plan, self._taken
        for order in self._orders:
            assert order.owners is not None
            window = _window(order)
            for s, owner in zip(order.slices.tolist(), order.owners.tolist(), strict=True):
                end = int(self._offsets[s + 1])
                queries = seen[:, max(int(self._offsets[s]), end - window) : end]
                positions = plan.positions[plan.starts[s] : plan.starts[s + 1]]
                at = self._memory.window(int(plan.lanes[s]), window, owner)
                at.put(int(positions[0]), int(positions[-1]) + 1, queries)


class QueryMemory:
    """See the module."""

    def __init__(self, spec: ModelSpec) -> None:
        self.num_layers, self.width = spec.num_layers, spec.num_heads * spec.head_dim
        self._num_heads = spec.num_heads
        self._windows: dict[tuple[int, int], _Window] = {}  # by lane and size

    def begin(self, plan: StepPlan) -> QueryStep | None:
        """What the step is to remember; None if that is nothing. A lane that runs without being ordered forgets."""
        orders = [order for order in plan.statistics if isinstance(order.statistic, FutureAttention)]
        if self._windows:
            kept = {(lane, _window(order)) for order in orders for lane in plan.lanes[order.slices].tolist()}
            running = set(plan.lanes.tolist())
            for key in [key for key in self._windows if key[0] in running and key not in kept]:
                del self._windows[key]
        if not any(map(len, orders)):
            return None
        for order in orders:
            assert order.owners is not None, "FutureAttention is ordered with the owners of the queries"
        return QueryStep(self, plan, orders)

    def window(self, lane: int, size: int, owner: int) -> _Window:
        found = self._windows.get((lane, size))
        if found is None or found.owner != owner:
            queries = found.queries if found is not None else torch.empty(self.num_layers, size, self.width)
            found = self._windows[lane, size] = _Window(owner, queries, 0, 0)
        return found

    def last(self, lane: int, statistic: FutureAttention, layer: int) -> Tensor:
        """[w, num_heads, head_dim] in order of position: `window` queries, or as many as are known."""
        window = self._windows[lane, statistic.window]
        places = torch.arange(window.begin, window.end) % window.size
        return window.queries[layer].index_select(0, places).view(len(places), self._num_heads, -1)


def _window(order: StatisticOrder) -> int:
    assert isinstance(order.statistic, FutureAttention)
    return order.statistic.window
