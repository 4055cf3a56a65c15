"""`HeavyHitters`: a simulated executor whose tokens draw attention as those of a language model do, very unevenly.

A policy that ranks tokens by attention needs attention to rank by. Drawn evenly, sums would grow with a token's age
and nothing else, survivors would be the beginning and the end of a text, and no arm would have anything to show. So a
query at position `i` gives a token at position `j` that it can see

    share * w[j] / W[i]  +  local(i - j)  +  (sink if j == 0)

in each of a few heads: `w` is log-normal, drawn by hash of the token and its position, `W[i]` its sum over what the
query can see, and `local` falls off geometrically over the last tokens. All of it is a function of what is visible,
not of where it lies, so victims are the same in every arm. Sums over the queries of a chunk have closed forms, and
need no matrix.

The parameters were read off SmolLM2-135M, 1,024 tokens of WikiText-2 and of a novel, all heads and layers: the first
token draws 0.30 of a query's attention, the 48 before the query 0.33 to 0.36, the rest what is left; of that rest a
token's mean over the heads spreads by 0.71 to 0.79 (standard deviation of the logarithm), which four heads with these
spreads give.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vtoken.base.hashing import mix64
from vtoken.executor.sim import SimExecutor
from vtoken.memory import bits
from vtoken.memory.copy import Copy, CopyCounts, CopyKind
from vtoken.policies.statistics import AttentionStatistic, CountLow, Statistic, Sum, SumLast
from vtoken.schedule.plan import StatisticOrder, StepPlan, StepResult

Floats = NDArray[np.float64]

_TOKEN: Final = 0x70  # a stream of random numbers


@dataclass(frozen=True)
class AttentionModel:
    """How unevenly attention falls.

    `sigma_token` and `sigma_head`: spread of `ln w` from token to token, and from head to head for the same token;
    `share`: of a query's attention that is given by weight; `sink`: that goes to the first token. What is left is
    local: it falls by `decay` from one token to the one before, and ends `reach` tokens back.
    """

    sigma_token: float = 0.65
    sigma_head: float = 0.7
    share: float = 0.35
    sink: float = 0.3
    decay: float = 0.85
    reach: int = 48
    num_heads: int = 4

    def weights(self, token_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> Floats:
        """[tokens, heads] of the tokens at these positions."""
        keys = mix64(_TOKEN, token_ids[:, None], positions[:, None], np.arange(1 + self.num_heads))
        normal = _normal(keys)  # the token's own, and one a head
        weights: Floats = np.exp(self.sigma_token * normal[:, :1] + self.sigma_head * normal[:, 1:])
        return weights

    def local(self, distance: NDArray[np.int64]) -> Floats:
        """What a query gives, by its local part, to a token so many tokens before it; its own counts as 0 before."""
        inside = (distance >= 0) & (distance < self.reach)
        powers: Floats = self.decay ** np.where(inside, distance, 0)
        return np.where(inside, self._local_scale * powers, 0.0)

    def local_sum(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> Floats:
        """The sum of `local` over the distances `first <= d < last`, both [n] and at least 0."""
        low, high = np.minimum(first, self.reach), np.minimum(np.maximum(last, first), self.reach)
        total: Floats = self._local_scale / (1 - self.decay) * (self.decay**low - self.decay**high)
        return total

    @property
    def _local_scale(self) -> float:
        return (1 - self.share - self.sink) * (1 - self.decay) / (1 - self.decay**self.reach)


@dataclass(frozen=True)
class _Seen:
    """What the queries of one slice see: the live past, and the slice's own tokens."""

    rows: NDArray[np.int64]  # [past + own], the past first
    positions: NDArray[np.int64]  # [past + own]
    weights: Floats  # [past + own, heads]
    num_past: int
    totals: Floats  # [own, heads] sum of the weights that each of the slice's queries sees


class HeavyHitters:
    """A `SimExecutor` that answers the plan's orders for attention by an `AttentionModel`."""

    def __init__(self, inner: SimExecutor, model: AttentionModel | None = None) -> None:
        self.model: Final = model or AttentionModel()
        self._inner = inner
        num_slots = len(inner.cells)
        self._weights: Floats = np.zeros((num_slots, self.model.num_heads))
        self._positions: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self._under_way: dict[int, Copy] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self._follow(copy for copy in plan.copies if copy.ticket is None)
        self._under_way |= {copy.ticket: copy for copy in plan.copies if copy.ticket is not None}
        ours = [order for order in plan.statistics if isinstance(order.statistic, AttentionStatistic)]
        rest = tuple(order for order in plan.statistics if not isinstance(order.statistic, AttentionStatistic))
        result = self._inner.execute(replace(plan, statistics=rest))
        self._weights[plan.write_slots] = self.model.weights(plan.token_ids, plan.positions)
        self._positions[plan.write_slots] = plan.positions
        statistics = dict(result.statistics) | self._gather(plan, ours)
        self._follow(self._under_way.pop(ticket) for ticket in result.ended)  # not before: they ran beside this step
        for ticket in result.failed:
            del self._under_way[ticket]
        return replace(result, statistics=statistics)

    def copy_counts(self) -> CopyCounts:
        return self._inner.copy_counts()

    def close(self) -> None:
        self._inner.close()

    def _follow(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            assert copy.kind in (CopyKind.RELOCATE, CopyKind.COPY_ON_WRITE), "nothing is swapped in this benchmark"
            self._weights[copy.dst] = self._weights[copy.src]
            self._positions[copy.dst] = self._positions[copy.src]

    # --- statistics -------------------------------------------------------------------------------------------------

    def _gather(self, plan: StepPlan, orders: list[StatisticOrder]) -> dict[str, Floats]:
        num_rows = plan.block_tables.shape[1] * plan.block_size
        counts = np.diff(plan.starts)
        gathered = {}
        for order in orders:
            values = np.zeros((len(order), num_rows))
            asked = plan.positions[plan.starts[order.slices + 1] - 1] >= order.first  # some query counts
            single = asked & (counts[order.slices] == 1)
            if single.any():
                values[single] = self._single(plan, order, order.slices[single])
            for i in np.flatnonzero(asked & ~single).tolist():
                seen = self._seen(plan, int(order.slices[i]))
                values[i, seen.rows] = self._chunk(order.statistic, seen, int(order.first[i]))
            gathered[order.statistic.name] = values
        return gathered

    def _single(self, plan: StepPlan, order: StatisticOrder, slices: NDArray[np.int32]) -> Floats:
        """[n, rows] of slices with one query each, all at once."""
        slots = plan.block_tables[slices][:, :, None].astype(np.int64) * plan.block_size + np.arange(plan.block_size)
        slots = slots.reshape(len(slices), -1)
        live = bits.unpack(plan.masks[slices], plan.block_size)
        new = plan.starts[slices]
        live[np.arange(len(slices)), plan.write_rows[new]] = True  # a query sees its own token
        slots[~live] = 0
        weights = np.where(live[..., None], self._weights[slots], 0.0)
        scaled = self.model.share * weights / weights.sum(axis=1, keepdims=True)
        distance = plan.positions[new].astype(np.int64)[:, None] - self._positions[slots]
        drawn = scaled + np.where(live, self.model.local(distance), 0.0)[..., None]
        drawn[live & (self._positions[slots] == 0)] += self.model.sink
        if isinstance(order.statistic, CountLow):
            is_low = (drawn < 1 / live.sum(axis=1)[:, None, None]) & live[..., None]
            counts: Floats = is_low.sum(axis=2).astype(np.float64)
            return counts
        total: Floats = drawn.sum(axis=2)
        return total

    def _seen(self, plan: StepPlan, index: int) -> _Seen:
        tokens = slice(int(plan.starts[index]), int(plan.starts[index + 1]))
        past = np.flatnonzero(bits.unpack(plan.masks[index], plan.block_size))
        blocks = plan.block_tables[index].astype(np.int64)
        slots = blocks[past // plan.block_size] * plan.block_size + past % plan.block_size
        slots = np.concatenate((slots, plan.write_slots[tokens]))
        weights = self._weights[slots]
        totals = weights[: len(past)].sum(axis=0) + np.cumsum(weights[len(past) :], axis=0)
        rows = np.concatenate((past, plan.write_rows[tokens].astype(np.int64)))
        return _Seen(rows, self._positions[slots], weights, len(past), totals)

    def _chunk(self, statistic: Statistic, seen: _Seen, first: int) -> Floats:
        """[past + own] what the queries at positions from `first` on add to each token that they see."""
        if isinstance(statistic, Sum | SumLast):
            return self._sums(seen, first)
        assert isinstance(statistic, CountLow), f"no model of {statistic}"
        return self._low_counts(seen, first)

    def _sums(self, seen: _Seen, first: int) -> Floats:
        queries = seen.positions[seen.num_past :]
        skipped = int(np.searchsorted(queries, first))
        shares = 1 / seen.totals
        shares[:skipped] = 0
        # [own + 1, heads]: of all queries from the i-th on
        from_here = np.concatenate((np.cumsum(shares[::-1], axis=0)[::-1], np.zeros((1, shares.shape[1]))))
        by_weight = np.empty(len(seen.rows))
        by_weight[: seen.num_past] = (seen.weights[: seen.num_past] * from_here[0]).sum(axis=1)
        by_weight[seen.num_past :] = (seen.weights[seen.num_past :] * from_here[:-1]).sum(axis=1)
        start = max(int(queries[0]), first)
        near = np.maximum(start - seen.positions, 0)
        local = self.model.local_sum(near, int(queries[-1]) + 1 - seen.positions)
        total: Floats = self.model.share * by_weight + self.model.num_heads * local
        total[seen.positions == 0] += self.model.num_heads * self.model.sink * (len(queries) - skipped)
        return total

    def _low_counts(self, seen: _Seen, first: int) -> Floats:
        queries = seen.positions[seen.num_past :]
        skipped = int(np.searchsorted(queries, first))
        num_seen = seen.num_past + 1 + np.arange(len(queries))
        # By weight alone a token draws less than its share where its weight is below this, [counted queries, heads].
        limits = (seen.totals / num_seen[:, None] / self.model.share)[skipped:]
        counts = np.zeros(len(seen.rows))
        # Beyond the local part of every counted query, the first token aside.
        far = (seen.positions <= queries[skipped] - self.model.reach) & (seen.positions > 0)
        for head in range(self.model.num_heads):
            above = np.searchsorted(np.sort(limits[:, head]), seen.weights[far, head], side="right")
            counts[far] += len(limits) - above
        near = np.flatnonzero(~far)
        distance = queries[skipped:, None] - seen.positions[near]
        local = self.model.local(distance)[..., None]
        local = local + np.where(seen.positions[near] == 0, self.model.sink, 0.0)[:, None]
        shares = self.model.share / seen.totals[skipped:, None]
        drawn = shares * seen.weights[near] + local  # [counted queries, near, heads]
        low = (drawn < 1 / num_seen[skipped:, None, None]) & (distance >= 0)[..., None]
        counts[near] += low.sum(axis=(0, 2))
        return counts


def _normal(hashes: NDArray[np.uint64]) -> Floats:
    """Standard normal numbers (Box and Muller), each from the two halves of a hash."""
    radius = ((hashes >> np.uint64(32)) + 0.5) * 2.0**-32
    angle = (hashes & np.uint64(2**32 - 1)) * 2.0**-32
    normal: Floats = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    return normal
