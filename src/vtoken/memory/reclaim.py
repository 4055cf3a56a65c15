"""`plan_reclaim`: which blocks sequences give back, and whether that is worth the copies; `rows_to_move`: how."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.memory import bits
from vtoken.memory.bits import Ints
from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import EMPTY, BlockTable
from vtoken.memory.copy import Copy
from vtoken.memory.decisions import ReclaimDecision, Verdict
from vtoken.memory.token_table import TokenTable

NOT_OWN = -1
"""In place of a live count: no block that the sequence could give back."""


@dataclass(frozen=True, eq=False)
class ReclaimPlan:
    """Which blocks come back."""

    returned: NDArray[np.bool_]  # [lanes, entries] dead, or emptied: their live tokens move into those that stay
    num_blocks: int
    num_copies: int  # live tokens in the blocks that come back
    refused: NDArray[np.int64]  # live tokens in each block that could have come back but was too dear
    reason: Verdict


@dataclass(frozen=True, eq=False)
class Reclamation:
    """What a reclaim did: the copies it takes, lane by lane, and how many blocks are available again."""

    copies: tuple[tuple[int, Copy], ...]
    num_blocks: int  # at once; those that copies beside the steps empty come back in `KVCacheManager.finish`
    decision: ReclaimDecision


def plan_reclaim(
    live: Ints,
    block_size: int,
    *,
    spare_cells: int | Ints = 0,
    wanted: int | None = None,
    max_cost: int | None = None,
    emptied_first: NDArray[np.bool_] | None = None,
) -> ReclaimPlan:
    """The cheapest way to get `wanted` blocks back from some sequences, or as many as there are.

    A sequence with `live` tokens in blocks of its own can be packed into `ceil((live + spare) / block_size)` of them.
    Of the rest, its emptiest blocks, each one costs as many copies as tokens live in it, whatever else is given back:
    so the cheapest blocks of all sequences together are the cheapest plan, and no search is needed. Nothing is copied
    for no gain: 4, 4, 4, 1 live in blocks of 4 need four blocks, and four there are. Dead blocks cost nothing, so they
    come first, also where their sequence is then short of spare cells: a block that costs nothing is no loss.

    Args:
        live: [lanes, entries] live tokens in each block of a sequence's own, NOT_OWN elsewhere.
        spare_cells: free cells to leave to a sequence that is about to write, [lanes] or the same for all.
        wanted: blocks; None = all that can come back. Not one token is moved for more than these.
        max_cost: copies a block at most; None = what it takes, which is never `block_size` or more.
        emptied_first: [lanes, entries] which one of two blocks to empty if as many tokens live in either.
    """
    num_entries = live.shape[1]
    is_own = live != NOT_OWN
    num_needed = -(-(np.where(is_own, live, 0).sum(axis=1) + spare_cells) // block_size)
    num_offered = np.maximum(is_own.sum(axis=1) - num_needed, (live == 0).sum(axis=1))
    lanes = np.flatnonzero(num_offered)
    returned = np.zeros_like(is_own)
    if not len(lanes):
        return ReclaimPlan(returned, 0, 0, np.zeros(0, np.int64), "no_gain")
    order = _emptiest_first(live[lanes], None if emptied_first is None else emptied_first[lanes])
    costs = np.take_along_axis(live[lanes], order, axis=1).astype(np.int64)
    offered = np.arange(num_entries) < num_offered[lanes][:, None]
    allowed = offered if max_cost is None else offered & (costs <= max_cost)
    limit = int(offered.sum()) if wanted is None else wanted

    taken = np.arange(num_entries) < _num_taken(costs, allowed, limit)[:, None]
    index, rank = np.nonzero(taken)
    returned[lanes[index], order[index, rank]] = True
    num_blocks, num_copies = len(index), int(costs[taken].sum())
    refused = np.sort(costs[offered & ~allowed])[: limit - num_blocks]
    nothing: Verdict = "too_dear" if len(refused) else "no_gain"
    done: Verdict = "packed" if num_copies else "dead_blocks"
    return ReclaimPlan(returned, num_blocks, num_copies, refused, done if num_blocks else nothing)


def _emptiest_first(live: Ints, emptied_first: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    """[lanes, entries] a sequence's own blocks in the order in which they are emptied, then the other entries. The last
    entry first among equals, so that tables stay short."""
    num_entries = live.shape[1]
    later = np.ones(live.shape, np.bool_) if emptied_first is None else ~emptied_first
    keys = (2 * live.astype(np.int64) + later) * num_entries + np.arange(num_entries)[::-1]
    keys[live == NOT_OWN] = np.iinfo(np.int64).max
    order: NDArray[np.int64] = np.argsort(keys, axis=1)
    return order


def _num_taken(costs: NDArray[np.int64], allowed: NDArray[np.bool_], limit: int) -> NDArray[np.int64]:
    """[lanes] how many blocks each sequence gives, so that the `limit` cheapest come back.

    Both arrays are [lanes, entries], costs ascending. Of blocks at the highest price paid not all may be needed: those
    of sequences that give some anyway come first, then of those that have most of them, then of the lower lane, so that
    few sequences are touched.
    """
    prices = costs[allowed]
    taken: NDArray[np.int64] = allowed.sum(axis=1)
    if limit >= len(prices):
        return taken
    if limit == 0:
        return np.zeros_like(taken)
    highest = np.partition(prices, limit - 1)[limit - 1]
    taken = (allowed & (costs < highest)).sum(axis=1)
    at_highest = (allowed & (costs == highest)).sum(axis=1)
    order = np.lexsort((-at_highest, taken == 0))
    before = np.cumsum(at_highest[order]) - at_highest[order]
    taken[order] += np.clip(limit - taken.sum() - before, 0, at_highest[order])
    return taken


def own_blocks(
    pool: BlockPool, blocks: BlockTable, tokens: TokenTable, lanes: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """([lanes, entries] live tokens in each used block that a lane holds alone and no copy touches, NOT_OWN elsewhere,
    [lanes, entries] whether it is published)."""
    num_entries = int(blocks.num_entries[lanes].max(initial=0))
    ids = blocks.ids[lanes, :num_entries]
    # Rows from num_rows on were never used: their blocks are held for tokens to come.
    is_used = np.arange(num_entries) * blocks.block_size < tokens.num_rows[lanes][:, None]
    is_own = (ids != EMPTY) & (pool.refs[ids] == 1) & (pool.pins[ids] == 0) & is_used
    live = np.where(is_own, bits.count(blocks.masks[lanes, :num_entries]), np.int32(NOT_OWN))
    return live, is_own & pool.published[ids]


def rows_to_move(
    blocks: BlockTable,
    lane: int,
    live: Ints,
    returned: NDArray[np.bool_],
    published: NDArray[np.bool_],
    *,
    to_the_front: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(source rows, target rows) that empty the blocks `returned` of a lane; all arrays are [entries], of its blocks.

    The fullest blocks are filled first, so that the emptiest stay cheap to empty; unpublished ones before published
    ones, whose content others may still want. `to_the_front`, all live tokens of the lane's own blocks come to lie in
    the lowest rows of those that stay, and the cells behind them are free: more copies, for who cannot use holes.
    """
    size = blocks.block_size
    is_live = bits.unpack(blocks.masks[lane, : len(live)], size)

    def rows_of(entries: NDArray[np.int64]) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = (entries[:, None] * size + np.arange(size)).reshape(-1)
        return rows

    stay, leave = np.flatnonzero((live > 0) & ~returned), np.flatnonzero((live > 0) & returned)
    if to_the_front:
        goal = rows_of(stay)[: int(live[live > 0].sum())]
        is_elsewhere = is_live.copy()
        is_elsewhere[goal] = False
        own = rows_of(np.flatnonzero(live > 0))
        return own[is_elsewhere[own]], goal[~is_live[goal]]
    sources, cells = rows_of(leave), rows_of(stay[np.lexsort((-live[stay], published[stay]))])
    sources, cells = sources[is_live[sources]], cells[~is_live[cells]]
    return sources, cells[: len(sources)]
