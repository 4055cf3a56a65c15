"""`Relief`: the rungs of the pressure ladder on which nobody is sent away.

    1. free blocks, 2. forget cached ones       `KVCacheManager` takes them in this order by itself
    3. drain: copies beside the steps that are about to end and give blocks back
    4. reclaim: holes that are there already
    5. evict: tokens die by policy, down to the budgets, and their blocks come back
    6. preempt                                  `Residents`

Rungs 1 to 4 lose nothing. With `on_pressure="preempt"` 6 comes before 5.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.memory import bits
from vtoken.memory.block_table import EMPTY
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.batch import PlanBuilder
from vtoken.schedule.config import SchedulerConfig, SchedulerCounters
from vtoken.schedule.evictor import Evictor
from vtoken.schedule.lane_state import LaneState

Lanes = NDArray[np.int64]

SPARE = 1  # free cells that a running sequence keeps, so that it does not ask for a block in the very next step
NEAR = 0.25  # share of the pool below which policies are told what they need to know
LOW_WATERMARK = 0.1  # share of the pool that is left when the repack arm looks for fragmentation
FRAGMENTED = 0.25  # share of dead cells from which it packs, as published


class Relief:
    """Gets blocks back from those who run."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVCacheManager,
        state: LaneState,
        counters: SchedulerCounters,
        evictor: Evictor,
    ) -> None:
        self._mode = config.kv_mode
        self._beside = config.kv_copies == "beside"
        self._memory = memory
        self._state = state
        self._counters = counters
        self._evictor = evictor

    def reclaim(self, batch: PlanBuilder, lanes: Lanes, num_missing: int) -> bool:
        """Rung 4, as far as it takes to get `num_missing` blocks. False if that changed nothing."""
        sparse = lanes[self._memory.tokens.evicted[lanes]]
        if not len(sparse):
            return False
        # Who may have needed more to get through his text, and is through it, holds what is left for nothing.
        is_through = self._state["total"][sparse] - self._memory.tokens.lengths[sparse] <= 1
        trimmed = self._memory.trim(sparse[is_through])
        self._counters.blocks_by_reclaim += trimmed
        num_missing -= trimmed
        if num_missing <= 0:
            self._counters.reclaims += 1
            return True
        before, available = int(self._memory.pool.refs.sum()), self._memory.num_available
        returned = self._give_back(batch, sparse, num_missing, trigger="pressure")
        self._counters.reclaims += returned > 0
        self._counters.blocks_by_reclaim += self._memory.num_available - available
        # Who lets go of a block that another one holds brings none back, but that one can write there now.
        return returned > 0 or int(self._memory.pool.refs.sum()) < before

    def evict(self, batch: PlanBuilder, lanes: Lanes) -> bool:
        """Rung 5, one round: of the sequence that has the most live tokens above its budget, of two the latest, a
        stride dies, in blocks that nobody else holds, and only if a block comes back. False if nobody can give one."""
        for lane, surplus in self._by_surplus(lanes):
            count = self._tokens_for_a_block(lane, surplus)
            if not count:
                continue
            killed = self._evictor.kill(lane, count, self._own_rows(lane))
            self._counters.tokens_evicted_under_pressure += killed
            available = self._memory.num_available
            if killed and self._give_back(batch, np.array([lane]), None, trigger="eviction"):
                self._counters.evictions += 1
                self._counters.blocks_by_eviction += self._memory.num_available - available
                return True
        return False

    def attainable(self, lanes: Lanes) -> int:
        """Blocks that rungs 4 and 5 could get from these lanes, at most."""
        if self._mode != "vtoken":
            return 0
        tokens, size = self._memory.tokens, self._memory.block_size
        surplus = self._surplus(lanes)
        total = 0
        for i in np.flatnonzero(tokens.evicted[lanes] | (surplus > 0)).tolist():
            own = self._own_live(int(lanes[i]))
            live = max(0, int(own.sum()) - int(surplus[i]))
            total += max(0, int(np.count_nonzero(own)) - -(-(live + SPARE) // size))
        return total

    def watch(self, batch: PlanBuilder, lanes: Lanes, *, somebody_waits: bool) -> None:
        """Once a step, before anything is planned: are blocks getting short, so that policies may soon be asked?"""
        available, num_blocks = self._memory.num_available, self._memory.pool.num_blocks
        self._evictor.is_near = somebody_waits or available <= max(2 * len(lanes), NEAR * num_blocks)
        if self._mode == "repack" and available <= LOW_WATERMARK * num_blocks:
            sparse = lanes[self._memory.tokens.evicted[lanes]]
            if len(sparse) and self._memory.fragmentation(sparse) > FRAGMENTED:
                self._give_back(batch, sparse, None, trigger="fragmentation", compact=True)

    def _give_back(
        self, batch: PlanBuilder, lanes: Lanes, wanted: int | None, *, trigger: str, compact: bool | None = None
    ) -> int:
        reclaimed = self._memory.reclaim(
            lanes,
            wanted=wanted,
            spare_cells=SPARE,
            compact=self._mode == "vtoken" if compact is None else compact,
            beside=self._beside,
            trigger=trigger,
        )
        for lane, copy in reclaimed.copies:
            batch.add_copy(copy, [self._state.of(lane).request])
        # Copies beside the steps bring theirs later.
        return reclaimed.num_blocks + (len(reclaimed.copies) if self._beside else 0)

    def _surplus(self, lanes: Lanes) -> NDArray[np.int32]:
        """Live tokens of each lane above its budget, 0 for those that may lose none: who has no policy, one that acts
        at places, or one that has not seen enough."""
        tokens, state = self._memory.tokens, self._state
        surplus = np.zeros(len(lanes), np.int32)
        # Of a text that is computed again it is settled what dies.
        is_new = tokens.lengths[lanes] >= state["settled"][lanes]
        may = np.flatnonzero((state["policy"][lanes] >= 0) & ~state["at_places"][lanes] & is_new)
        may = may[self._evictor.is_ready(lanes[may])]
        some = lanes[may]
        surplus[may] = np.maximum(tokens.num_live[some] - state.budgets(some, tokens.lengths[some]), 0)
        return surplus

    def _by_surplus(self, lanes: Lanes) -> list[tuple[int, int]]:
        """(lane, surplus) of those that have one, the largest first, of equal ones the latest arrival."""
        surplus = self._surplus(lanes)
        order = np.lexsort((-self._state["arrival"][lanes], -surplus))
        order = order[surplus[order] > 0]
        return list(zip(lanes[order].tolist(), surplus[order].tolist(), strict=True))

    def _own_live(self, lane: int) -> NDArray[np.int32]:
        """Live tokens in each block that this lane holds alone, by entry; 0 for the others."""
        memory = self._memory
        ids = memory.blocks.ids[lane, : memory.blocks.num_entries[lane]]
        is_own = (ids != EMPTY) & (memory.pool.refs[ids] == 1) & (memory.pool.pins[ids] == 0)
        own: NDArray[np.int32] = np.where(is_own, bits.count(memory.blocks.masks[lane, : len(ids)]), 0)
        return own

    def _own_rows(self, lane: int) -> NDArray[np.bool_]:
        """[rows] whether each row of a lane lies in a block that it holds alone."""
        return np.repeat(self._own_live(lane) > 0, self._memory.block_size)

    def _tokens_for_a_block(self, lane: int, surplus: int) -> int:
        """How many tokens of a lane have to die, a stride at least, for a block to come back; 0 = its surplus is too
        small. Without packing nobody can tell, so the whole surplus goes."""
        if self._mode != "vtoken":
            return surplus
        own = self._own_live(lane)
        kept = (int(np.count_nonzero(own)) - 1) * self._memory.block_size - SPARE
        if kept < 0:
            return 0
        count = max(min(int(self._state["stride"][lane]), surplus), int(own.sum()) - kept)
        return count if count <= surplus else 0
