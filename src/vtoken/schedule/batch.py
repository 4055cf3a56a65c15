"""`PlanBuilder`: gathers the slices of one step and freezes them into a `StepPlan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.block_table import EMPTY
from vtoken.memory.copy import Copy
from vtoken.memory.kv_cache_manager import Extension, KVCacheManager
from vtoken.policies.statistics import CacheStatistic
from vtoken.schedule.beams import num_candidates
from vtoken.schedule.evictor import Evictor
from vtoken.schedule.lane_state import LaneState
from vtoken.schedule.logit_rules import order_rules
from vtoken.schedule.plan import SamplingBatch, StepPlan
from vtoken.schedule.scoring import order_scores
from vtoken.schedule.sequence import Request, Sequence


class PlanBuilder:
    """One step in the making. `draws` lists the sequences that get a token, in the order of `StepPlan.sampling`."""

    def __init__(self, memory: KVCacheManager, state: LaneState, max_tokens: int) -> None:
        self._memory = memory
        self._state = state
        self.tokens_left = max_tokens
        self.copies: list[Copy] = []
        self.touched: set[Request] = set()  # whose slots the copies read or write
        self.draws: list[Sequence] = []
        self._lanes: list[NDArray[np.int64]] = []
        self._counts: list[NDArray[np.int64]] = []
        self._extensions: list[Extension] = []

    @property
    def is_empty(self) -> bool:
        return not self._extensions and not self.copies

    def add_copy(self, copy: Copy, requests: Iterable[Request]) -> None:
        """A copy that runs before the forward pass, and whose slots it reads or writes."""
        self.copies.append(copy)
        self.touched.update(requests)

    def add_slices(self, lanes: NDArray[np.int64], counts: NDArray[np.int64], extension: Extension) -> None:
        """Add a slice a lane, whose cells the books have just given out, and publish the blocks that it fills."""
        self._lanes.append(lanes)
        self._counts.append(counts)
        self._extensions.append(extension)
        self.tokens_left -= int(counts.sum())
        self.copies += extension.copies
        size, after = self._memory.block_size, self._memory.tokens.lengths[lanes]
        if self._memory.enable_prefix_caching:
            for lane in lanes[after // size > (after - counts) // size].tolist():
                sequence = self._state.of(lane)
                sequence.hashes.extend(sequence.token_ids, int(self._memory.tokens.lengths[lane]))
                self._memory.publish(lane, sequence.hashes)

    def build(self, step: int, evictor: Evictor, *, row_positions: bool, rope_lengths: bool = False) -> StepPlan:
        """Freeze. `evictor` says what the slices are to find out. `row_positions`: the attention backend wants to know
        where past tokens stand in their text; `rope_lengths`: the model, what its sequences turn by."""
        memory, state = self._memory, self._state
        lanes = np.concatenate([np.empty(0, np.int64), *self._lanes])
        counts = np.concatenate([np.empty(0, np.int64), *self._counts])
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        extensions = self._extensions
        block_tables, masks = self._join_tables(len(memory.blocks.full))
        positions = _join([e.positions for e in extensions], np.int32)
        statistics = evictor.order(lanes, counts)
        row_positions |= any(isinstance(order.statistic, CacheStatistic) for order in statistics)
        positions_of_rows = None
        if row_positions and not memory.tokens.in_order[lanes].all():
            positions_of_rows = memory.tokens.positions[lanes, : block_tables.shape[1] * memory.block_size]
        return StepPlan(
            step=step,
            block_size=memory.block_size,
            copies=tuple(self.copies),
            lanes=lanes.astype(np.int32),
            starts=starts,
            token_ids=self._token_ids(lanes, counts, starts),
            positions=positions,
            write_slots=_join([e.slots for e in extensions], np.int64),
            write_rows=_join([e.rows for e in extensions], np.int32),
            block_tables=block_tables,
            masks=masks,
            past_live=_join([e.past_live for e in extensions], np.int32),
            sampling=self._sampling(lanes, state["total"][lanes] == memory.tokens.lengths[lanes]),
            row_positions=positions_of_rows,
            statistics=statistics,
            scoring=order_scores(state, lanes, starts, positions),
            awaited=self._awaited(),
            rope_lengths=state["rope_length"][lanes] if rope_lengths else None,
        )

    def _awaited(self) -> tuple[int, ...]:
        ordered = {copy.ticket for copy in self.copies}
        return tuple(ticket for ticket in self._memory.moves.tickets if ticket not in ordered)

    def _join_tables(self, words: int) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
        if len(self._extensions) == 1:
            return self._extensions[0].block_tables, self._extensions[0].past_masks
        num_slices = sum(len(e.block_tables) for e in self._extensions)
        num_entries = max((e.block_tables.shape[1] for e in self._extensions), default=0)
        tables = np.full((num_slices, num_entries), EMPTY, np.int32)
        masks = np.zeros((num_slices, num_entries, words), np.uint32)
        at = 0
        for extension in self._extensions:
            n, entries = extension.block_tables.shape
            tables[at : at + n, :entries] = extension.block_tables
            masks[at : at + n, :entries] = extension.past_masks
            at += n
        return tables, masks

    def _token_ids(
        self, lanes: NDArray[np.int64], counts: NDArray[np.int64], starts: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        lengths, total = self._memory.tokens.lengths, self._state["total"]
        token_ids = np.empty(int(starts[-1]), np.int32)
        # In decode the one new token is the last one known; only prompts are read from the text.
        is_last = (counts == 1) & (total[lanes] == lengths[lanes])
        token_ids[starts[:-1][is_last]] = self._state["last_token"][lanes[is_last]]
        for i in np.flatnonzero(~is_last).tolist():
            end = int(lengths[lanes[i]])
            chunk = self._state.of(int(lanes[i])).token_ids[end - int(counts[i]) : end]
            token_ids[starts[i] : starts[i + 1]] = chunk
        return token_ids

    def _sampling(self, lanes: NDArray[np.int64], is_complete: NDArray[np.bool_]) -> SamplingBatch:
        """Slices whose text is complete draw: once, or once for each choice if the choices are still to fork."""
        state = self._state
        slices = np.flatnonzero(is_complete)
        drawn = lanes[slices]
        self.draws = [state.of(lane) for lane in drawn.tolist()]
        choices = state["choice"][drawn]
        num_unforked = state["num_unforked"][drawn]
        if num_unforked.any():
            self.draws = [s for leader in self.draws for s in (leader, *leader.request.unforked)]
            slices, drawn = np.repeat(slices, num_unforked + 1), np.repeat(drawn, num_unforked + 1)
            choices = np.array([sequence.choice for sequence in self.draws], np.int32)
        num_logprobs = state["num_logprobs"][drawn]
        searched = np.flatnonzero(state["is_beam"][drawn])
        return SamplingBatch(
            slices=slices.astype(np.int32),
            temperature=state["temperature"][drawn],
            top_k=state["top_k"][drawn],
            top_p=state["top_p"][drawn],
            min_p=state["min_p"][drawn],
            seeds=state["seed"][drawn],
            choices=choices,
            indices=state["total"][drawn] - state["prompt"][drawn],
            rules=order_rules(self.draws),
            scored=np.flatnonzero(num_logprobs >= 0),
            num_top=max(0, int(num_logprobs.max(initial=-1))),
            searched=searched,
            num_candidates=num_candidates(self.draws[draw].request for draw in searched.tolist()),
        )


def _join(parts: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def share_budget(
    need: NDArray[np.int64], arrival: NDArray[np.int64], budget: int, waiting_tokens: Callable[[int], int]
) -> NDArray[np.int64]:
    """Tokens each of n lanes may compute in a step of `budget` tokens: one for whoever decodes, the rest for prompts.

    The oldest prompt gets half of the step's budget at least, so that others cannot hold it up by more than twice
    its time; what the later ones and the queue could use of the rest is theirs, so that it does not hold them up.

    Args:
        need: [n] tokens that each could compute.
        arrival: [n] the order in which their requests came.
        waiting_tokens: how many tokens the queue could use, counted up to so many.
    """
    counts: NDArray[np.int64] = (need == 1).astype(np.int64)
    left = budget - int(counts.sum())
    prompts = np.flatnonzero(need > 1)
    if len(prompts):
        prompts = prompts[np.argsort(arrival[prompts], kind="stable")]
        others = int(need[prompts[1:]].sum()) + waiting_tokens(budget)
        oldest = min(left, max(left - others, -(-budget // 2)))
        for i, allowed in zip(prompts.tolist(), [oldest] + [left] * (len(prompts) - 1), strict=True):
            counts[i] = min(int(need[i]), allowed, left)
            left -= int(counts[i])
    return counts
