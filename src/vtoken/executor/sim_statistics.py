"""Statistics of the simulated model: numbers that behave like those of a real one and depend on the cells alone.

The pseudo attention: a token with cell `c` has a weight in the eyes of the query at position `p`,

    w(c, p) = heavy(c) + heavy(c, p // PHASE),

a part that stays and a part that changes every `PHASE` positions, both drawn from a hash with a long tail, so that few
tokens draw much and most draw little, as in real text. The query gives each token that it sees, itself included, the
share `w / sum of w`. Shares are whole multiples of 2**-36 and their sums are exact. So what a query gives depends on
its position and on the cells that it sees: not on chunks, on the batch, or on where cells lie. That holds for `Sum`,
`SumLast` and `CountLow` alike.

A `CacheStatistic` of a token is a number in [0, 1) hashed from its cell and the name of the statistic. It does not
depend on the other tokens that live, and is the same whenever it is read.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vtoken.base.hashing import mix64, uniform
from vtoken.policies.statistics import AttentionStatistic, CacheStatistic, CountLow
from vtoken.schedule.plan import StatisticOrder, StepPlan

PHASE: Final = 64  # positions of queries that see a token alike
SHARE_UNIT: Final = 2.0**-36
_ONE: Final = np.uint64(2**36)


def sim_statistics(
    plan: StepPlan,
    visible: NDArray[np.uint64],  # [S, E * block_size] by row: past cells that each slice can read, 0 for the others
    own: NDArray[np.uint64],  # [T] cells of the new tokens
) -> dict[str, NDArray[np.float64]]:
    """`StepResult.statistics` of a plan."""
    num_rows = max(visible.shape[1], int(plan.write_rows.max(initial=-1)) + 1)
    return {
        order.statistic.name: _gathered(plan, order, visible, own, num_rows)
        if isinstance(order.statistic, AttentionStatistic)
        else _read(plan, order, visible, own, num_rows)
        for order in plan.statistics
    }


def _heavy(*keys: object) -> NDArray[np.uint64]:
    """Between 252 and 2**14; above x with a chance of about 256 / x."""
    return np.uint64(2**20) // (np.uint64(64) + (mix64(*keys) & np.uint64(0xFFF)))  # type: ignore[arg-type]


def _gathered(
    plan: StepPlan, order: StatisticOrder, visible: NDArray[np.uint64], own: NDArray[np.uint64], num_rows: int
) -> NDArray[np.float64]:
    result = np.zeros((len(order), num_rows))
    counts_low = isinstance(order.statistic, CountLow)
    slices = order.slices.astype(np.int64)
    begins, ends = plan.starts[slices], plan.starts[slices + 1]
    is_counted = plan.positions[ends - 1] >= order.first
    # Slices of one token, which is what most steps have many of, all at once.
    lines = np.flatnonzero(is_counted & (ends - begins == 1))
    if len(lines):
        some, tokens = slices[lines], begins[lines]
        past, phases = visible[some], plan.positions[tokens] // PHASE
        weights = np.where(past != 0, _heavy(past) + _heavy(past, phases[:, None]), np.uint64(0))
        own_weights = _heavy(own[tokens]) + _heavy(own[tokens], phases)
        totals = weights.sum(axis=1, dtype=np.uint64) + own_weights
        num_seen = (plan.past_live[some] + 1).astype(np.uint64)
        given = _given(weights, totals[:, None], num_seen[:, None], counts_low)
        result[lines, : visible.shape[1]] = np.where(past != 0, given, 0.0)
        result[lines, plan.write_rows[tokens]] = _given(own_weights, totals, num_seen, counts_low)
    for line in np.flatnonzero(is_counted & (ends - begins > 1)).tolist():
        tokens = np.arange(begins[line], ends[line])
        rows = np.flatnonzero(visible[slices[line]])
        cells = np.concatenate((visible[slices[line], rows], own[tokens]))
        rows = np.concatenate((rows, plan.write_rows[tokens]))
        result[line, rows] = _chunk(cells, plan.positions[tokens], int(order.first[line]), counts_low)
    return result


def _given(
    weights: NDArray[np.uint64], totals: NDArray[np.uint64], num_seen: NDArray[np.uint64], counts_low: bool
) -> NDArray[np.float64]:
    if counts_low:
        return (weights * num_seen < totals).astype(np.float64)
    return (weights * (_ONE // totals)).astype(np.float64) * SHARE_UNIT


def _chunk(
    cells: NDArray[np.uint64],  # [P + n] the past, then the chunk's own
    positions: NDArray[np.int32],  # [n]
    first: int,
    counts_low: bool,
) -> NDArray[np.float64]:
    """[P + n] what the chunk's queries at positions from `first` on give."""
    num_past = len(cells) - len(positions)
    result = np.zeros(len(cells))
    stays = _heavy(cells)
    phases = positions // PHASE
    for phase in np.unique(phases[positions >= first]).tolist():
        weights = stays + _heavy(cells, phase)
        mine = np.flatnonzero((phases == phase) & (positions >= first))
        # The query at place i of the chunk sees the first num_past + i + 1 cells.
        running = np.cumsum(weights, dtype=np.uint64)
        totals, num_seen = running[num_past + mine], (num_past + mine + 1).astype(np.uint64)
        if counts_low:
            sees = np.arange(len(cells))[:, None] <= num_past + mine  # [P + n, queries]
            result += (sees & (weights[:, None] * num_seen < totals)).sum(axis=1)
        else:
            rates = np.concatenate(([np.uint64(0)], np.cumsum(_ONE // totals, dtype=np.uint64)))
            blind = np.searchsorted(mine, np.arange(len(cells)) - num_past)  # queries that come before a cell
            result += (weights * (rates[-1] - rates[blind])).astype(np.float64) * SHARE_UNIT
    return result


def _read(
    plan: StepPlan, order: StatisticOrder, visible: NDArray[np.uint64], own: NDArray[np.uint64], num_rows: int
) -> NDArray[np.float64]:
    assert isinstance(order.statistic, CacheStatistic)
    cells = np.zeros((len(order), num_rows), np.uint64)
    cells[:, : visible.shape[1]] = visible[order.slices]
    positions = np.broadcast_to(np.arange(num_rows), cells.shape).copy()
    if plan.row_positions is not None:
        positions[:, : visible.shape[1]] = plan.row_positions[order.slices]
    begins, ends = plan.starts[order.slices], plan.starts[order.slices + 1]
    for line, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        rows = plan.write_rows[begin:end]
        cells[line, rows], positions[line, rows] = own[begin:end], plan.positions[begin:end]
    wanted = cells != 0
    if order.statistic.is_fixed:
        wanted &= positions >= order.first[:, None]
    if order.due is not None:
        wanted &= order.due[:, None]
    name = zlib.crc32(order.statistic.name.encode())
    result = np.full(cells.shape, np.nan)
    result[wanted] = uniform(cells[wanted], name)
    return result
