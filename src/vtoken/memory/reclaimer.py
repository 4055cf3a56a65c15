"""`Reclaimer`: tokens move within their sequence, and the blocks they left go back to the pool."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.memory import bits
from vtoken.memory.beside import BesideMoves
from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import EMPTY, BlockTable
from vtoken.memory.copy import Copy, CopyKind
from vtoken.memory.decisions import DecisionLog, ReclaimDecision
from vtoken.memory.prefix_cache import PrefixCache
from vtoken.memory.reclaim import NOT_OWN, ReclaimPlan, Reclamation, own_blocks, plan_reclaim, rows_to_move
from vtoken.memory.slot_allocator import SlotAllocator
from vtoken.memory.stats import MemoryCounters
from vtoken.memory.token_table import TokenTable


class Reclaimer:
    """Carries out what `KVCacheManager` has found to be sound: its arguments are not checked again."""

    def __init__(
        self,
        pool: BlockPool,
        blocks: BlockTable,
        tokens: TokenTable,
        slots: SlotAllocator,
        prefix: PrefixCache,
        moves: BesideMoves,
        counters: MemoryCounters,
        max_cost_per_block: int | None,
    ) -> None:
        self.decisions = DecisionLog()
        self._under_way: dict[int, tuple[int, int]] = {}  # ticket of a copy beside -> (number of its decision, lane)
        self._pool = pool
        self._blocks = blocks
        self._tokens = tokens
        self._slots = slots
        self._prefix = prefix
        self._moves = moves
        self._counters = counters
        self._max_cost_per_block = max_cost_per_block

    def relocate(
        self, lane: int, source_rows: NDArray[np.int64], target_rows: NDArray[np.int64], *, beside: bool
    ) -> Copy:
        """Move live tokens into free cells that the lane may write: rows [n] to rows [n]."""
        lanes = np.full(len(source_rows), lane)
        sources, targets = self._blocks.slots(lanes, source_rows), self._blocks.slots(lanes, target_rows)
        blocks = np.unique(targets // self._blocks.block_size)
        for block in blocks[self._pool.published[blocks]].tolist():
            self._prefix.forget_block(block)  # its content is about to change
        self._counters.tokens_relocated += len(sources)
        if beside:
            return self._moves.begin(lane, source_rows, target_rows, sources, targets)
        self._tokens.move(lane, source_rows, target_rows)
        return Copy(CopyKind.RELOCATE, sources, targets)

    def finish(self, ticket: int, *, copied: bool) -> None:
        """A copy beside the steps has ended: its map is switched, and what it emptied returns."""
        lane, num_returned = self._moves.finish(ticket, copied=copied), 0
        if lane is not None:
            num_returned = self._return_dead(np.array([lane]))
            self._counters.blocks_reclaimed_packed += num_returned
            self._counters.blocks_drained += num_returned
            self._end_behind_last(lane)
        if ticket in self._under_way:
            number, moved = self._under_way.pop(ticket)
            self.decisions.enter(number, "drop" if lane is None else "return", lane=moved, blocks=num_returned)

    def reclaim(
        self,
        lanes: NDArray[np.int64],
        *,
        wanted: int | None,
        spare_cells: NDArray[np.int64],
        compact: bool,
        beside: bool,
        trigger: str,
    ) -> Reclamation:
        """Dead blocks first, then the cheapest ones to empty; `spare_cells` is [n], of the distinct `lanes` [n]."""
        num_dead = self._return_dead(lanes)
        missing = None if wanted is None else max(0, wanted - num_dead)
        packs = compact and missing != 0
        can_move = np.array([packs and not self._moves.is_pending(lane) for lane in lanes.tolist()], np.bool_)
        movers = lanes[can_move]
        live, published = own_blocks(self._pool, self._blocks, self._tokens, movers)
        plan = self._plan(live, published, spare_cells[can_move], missing)
        copies = []
        for i in np.flatnonzero(plan.returned.any(axis=1)).tolist():
            lane, packs_front = int(movers[i]), not self._slots.reuse_cells
            rows = rows_to_move(self._blocks, lane, live[i], plan.returned[i], published[i], to_the_front=packs_front)
            copies.append((lane, self.relocate(lane, *rows, beside=beside)))
        num_packed = 0
        if copies and not beside:
            num_packed = self._give_back(movers, plan.returned)
            for lane, _ in copies:
                self._end_behind_last(lane)
            if not self._slots.reuse_cells:
                # A block emptied for tokens to come is of use behind the last live token only: before one, in a block
                # that others hold too, it would never be written again.
                num_packed += self._return_dead(movers)
        self._counters.reclaim_plans += 1
        self._counters.blocks_reclaimed_dead += num_dead
        self._counters.blocks_reclaimed_packed += num_packed

        num_copied = sum(len(copy) for _, copy in copies)
        num_returned = num_dead + (plan.num_blocks if beside else num_packed)
        reason = "dead_blocks" if num_dead and not copies else plan.reason
        is_refused = reason == "too_dear"
        decision = ReclaimDecision(
            number=self.decisions.num_decisions,
            step=self.decisions.step,
            trigger=trigger,
            num_lanes=len(lanes),
            blocks_wanted=wanted,
            blocks_returned=num_returned,
            tokens_copied=num_copied,
            cost=int(plan.refused.sum()) if is_refused else num_copied,
            value=(len(plan.refused) if is_refused else num_returned) * self._blocks.block_size,
            verdict=reason,
        )
        self._log(decision, copies, num_dead + num_packed)
        return Reclamation(tuple(copies), num_dead + num_packed, decision)

    def trim(self, lanes: NDArray[np.int64]) -> int:
        """Blocks behind the last row ever used return; `lanes` [n] are distinct."""
        num_entries = int(self._blocks.num_entries[lanes].max(initial=0))
        ids = self._blocks.ids[lanes, :num_entries]
        is_unused = np.arange(num_entries) * self._blocks.block_size >= self._tokens.num_rows[lanes][:, None]
        is_unused &= (ids != EMPTY) & (self._pool.pins[ids] == 0)  # a copy beside the steps may be about to fill it
        num_returned = self._give_back(lanes, is_unused)
        self._counters.blocks_trimmed += num_returned
        return num_returned

    def _log(self, decision: ReclaimDecision, copies: list[tuple[int, Copy]], num_returned: int) -> None:
        self.decisions.add(decision)
        for lane, copy in copies:
            self.decisions.enter(decision.number, "copy", lane=lane, tokens=len(copy))
            if copy.ticket is not None:
                self._under_way[copy.ticket] = decision.number, lane
        if num_returned:
            self.decisions.enter(decision.number, "return", blocks=num_returned)

    def _plan(
        self,
        live: NDArray[np.int32],
        published: NDArray[np.bool_],
        spare_cells: NDArray[np.int64],
        wanted: int | None,
    ) -> ReclaimPlan:
        size = self._blocks.block_size
        plan = plan_reclaim(
            live,
            size,
            spare_cells=spare_cells,
            wanted=wanted,
            max_cost=self._max_cost_per_block,
            emptied_first=published,
        )
        if self._slots.reuse_cells or not plan.num_blocks:
            return plan
        # Half packed, a sequence that cannot use holes has gained little: limits choose whom to pack, as a whole.
        left_alone = ~plan.returned.any(axis=1, keepdims=True)
        live = np.where(left_alone, np.int32(NOT_OWN), live)
        return plan_reclaim(live, size, spare_cells=spare_cells, emptied_first=published)

    def _return_dead(self, lanes: NDArray[np.int64]) -> int:
        """Let go of the blocks in which no token of a lane lives. Returns how many of them nobody holds any more."""
        num_entries = int(self._blocks.num_entries[lanes].max(initial=0))
        ids = self._blocks.ids[lanes, :num_entries]
        # Rows from num_rows on were never used: their blocks are held for tokens to come, not dead.
        is_dead = ~bits.occupied(self._blocks.masks[lanes, :num_entries]) & (ids != EMPTY)
        is_dead &= np.arange(num_entries) * self._blocks.block_size < self._tokens.num_rows[lanes][:, None]
        is_dead &= self._pool.pins[ids] == 0  # a copy beside the steps may be about to fill it
        return self._give_back(lanes, is_dead)

    def _give_back(self, lanes: NDArray[np.int64], which: NDArray[np.bool_]) -> int:
        """Let go of blocks in which nothing lives: `which` is [lanes, entries]. Returns how many of them nobody holds
        any more."""
        index, entries = np.nonzero(which)
        if not len(index):
            return 0
        given = self._blocks.ids[lanes[index], entries]
        self._blocks.ids[lanes[index], entries] = EMPTY
        # A prefix whose holder has moved on is the first to be forgotten.
        self._prefix.keep_as_oldest(self._pool.drop_refs(given))
        for lane in np.unique(lanes[index]).tolist():
            self._blocks.cut(lane)
            self._tokens.cut(lane)
        return len(np.unique(given[self._pool.refs[given] == 0]))

    def _end_behind_last(self, lane: int) -> None:
        """Where holes are not reused, the cells behind the last live token are tail slack again after a move."""
        if not self._slots.reuse_cells and not self._pool.pins[self._blocks.held(lane)].any():
            live = self._blocks.live_rows(lane)
            self._tokens.num_rows[lane] = live[-1] + 1 if len(live) else 0
