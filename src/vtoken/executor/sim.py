"""`SimExecutor`: a model of a model. It keeps books of what was really written where, and so finds any wrong read.

A cell holds one number: a hash of its token, its position and of everything its sequence could read when it was
written, just as a key in a deep model depends on the whole context. The next token is a hash of all the cells that the
query can read. So one wrong slot, one stale cell, one missing copy changes the output, and nothing else does: not the
batch, not the chunks, not the place.

With `m` the hash of token and position, the cell is `c = a m + b s` for the sum `s` of all readable cells (modulo
2**64); a chunk's cells then follow from one cumulative sum: `s_i = k**i (s_0 + sum_j<i k**-(j+1) a m_j)`, `k = 1 + b`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vtoken.base.hashing import mix64, uniform
from vtoken.executor.sim_statistics import sim_statistics
from vtoken.memory import bits
from vtoken.memory.copy import Copy, CopyCounts, CopyKind
from vtoken.schedule.plan import Candidates, StepPlan, StepResult, TokenScores

_A = np.uint64(0xD1342543DE82EF95)
_K = np.uint64(0x5851F42D4C957F2D)  # odd, so it has an inverse
_B = _K - np.uint64(1)
_K_INVERSE = np.uint64(pow(int(_K), -1, 2**64))


class SimExecutor:
    """Executes plans on numbers instead of tensors, thousands of steps a second.

    It gives every statistic (see `sim_statistics`). Beside-copies end `beside_delay` steps after they were ordered.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, vocab_size: int = 1000, beside_delay: int = 0
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.beside_delay = beside_delay
        self.cells: NDArray[np.uint64] = np.zeros(num_blocks * block_size, np.uint64)
        self.host_cells: NDArray[np.uint64] = np.zeros(num_host_blocks * block_size, np.uint64)
        self._counts = CopyCounts()
        self._under_way: list[tuple[int, Copy]] = []  # (step at which it ends, beside-copy)
        self._powers = np.ones(1, np.uint64), np.ones(1, np.uint64)

    def execute(self, plan: StepPlan) -> StepResult:
        ended = self._run_copies(plan)
        known = {*ended, *(copy.ticket for _, copy in self._under_way)}
        failed = tuple(ticket for ticket in plan.awaited if ticket not in known)
        with np.errstate(over="ignore"):  # arithmetic modulo 2**64 on purpose
            after, visible = self._forward(plan)
        batch = plan.sampling
        streams = np.where(batch.is_greedy, np.uint64(0), mix64(batch.seeds, batch.choices, batch.indices))
        tokens = (mix64(after[batch.slices], streams) % np.uint64(self.vocab_size)).astype(np.int32)
        own = self.cells[plan.write_slots]
        # A cell says what its token could read, so the score of what comes after it depends on that, and nothing else.
        scores = _scores(own[plan.scoring.after], plan.scoring.targets, plan.scoring.num_top)
        drawn = _scores(after[batch.slices[batch.scored]], tokens[batch.scored], batch.num_top)
        statistics = sim_statistics(plan, visible, own)
        return StepResult(
            plan.step,
            tokens,
            statistics=statistics,
            scores=scores,
            drawn=drawn,
            candidates=self._candidates(after[batch.slices[batch.searched]], batch.num_candidates),
            ended=ended,
            failed=failed,
        )

    def _candidates(self, contexts: NDArray[np.uint64], count: int) -> Candidates:
        """After what could be read, `count` tokens that follow each other, the likelihood of each as much of a hash."""
        tokens = (
            mix64(contexts, 0xBEA)[:, None] % np.uint64(self.vocab_size) + np.arange(count, dtype=np.uint64)
        ).astype(np.int64)
        logprobs = -np.sort(uniform(contexts[:, None], np.arange(count)), axis=1)
        return Candidates((tokens % self.vocab_size).astype(np.int32), logprobs)

    def _count(self, copy: Copy) -> None:
        self._counts.num_copies[copy.kind] += 1
        self._counts.bytes_copied[copy.kind] += len(copy) * self.cells.itemsize

    def copy_counts(self) -> CopyCounts:
        """Of cells of 8 bytes; copies take no time."""
        return replace(
            self._counts, num_copies=self._counts.num_copies.copy(), bytes_copied=self._counts.bytes_copied.copy()
        )

    def close(self) -> None:
        """Nothing to give back."""

    def poison(self, blocks: NDArray[np.int32], step: int) -> None:
        """Overwrite blocks that nobody may read any more."""
        slots = blocks[:, None].astype(np.int64) * self.block_size + np.arange(self.block_size)
        self.cells[slots] = mix64(slots, step, 0xDEAD)

    def _run_copies(self, plan: StepPlan) -> tuple[int, ...]:
        for copy in plan.copies:
            if copy.ticket is None:
                source = self.host_cells if copy.kind is CopyKind.SWAP_IN else self.cells
                target = self.host_cells if copy.kind is CopyKind.SWAP_OUT else self.cells
                target[copy.dst] = source[copy.src]
                self._count(copy)
            else:
                self._under_way.append((plan.step + self.beside_delay, copy))
        ended = [copy for end, copy in self._under_way if end <= plan.step]
        self._under_way = [(end, copy) for end, copy in self._under_way if end > plan.step]
        for copy in ended:
            self.cells[copy.dst] = self.cells[copy.src]
            self._count(copy)
        return tuple(copy.ticket for copy in ended if copy.ticket is not None)

    def _forward(self, plan: StepPlan) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Write the new cells. Returns the sum of all that each slice's last query can read, itself included [S], and
        the past cells that it can read, 0 for the others [S, rows]."""
        slots = plan.block_tables[:, :, None].astype(np.int64) * self.block_size + np.arange(self.block_size)
        slots = slots.reshape(plan.num_slices, plan.block_tables.shape[1] * self.block_size)
        live = bits.unpack(plan.masks, self.block_size)
        slots[~live] = 0
        # A slice may have matched blocks that another one writes in this very plan: it has to come after that one.
        is_new = np.zeros(len(self.cells), np.bool_)
        is_new[plan.write_slots] = True
        waits = (is_new[slots] & live).any(axis=1)
        after = np.zeros(plan.num_slices, np.uint64)
        visible = np.zeros(slots.shape, np.uint64)
        for some in (np.flatnonzero(~waits), *np.flatnonzero(waits)[:, None]):
            visible[some] = np.where(live[some], self.cells[slots[some]], np.uint64(0))
            after[some] = self._write(plan, some, visible[some].sum(axis=1, dtype=np.uint64))
        return after, visible

    def _write(self, plan: StepPlan, slices: NDArray[np.int64], sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        starts, counts = plan.starts[slices], np.diff(plan.starts)[slices]
        after = np.empty_like(sums)
        single = counts == 1
        first = starts[single]
        cells = _A * mix64(plan.token_ids[first], plan.positions[first]) + _B * sums[single]
        self.cells[plan.write_slots[first]] = cells
        after[single] = sums[single] + cells
        power, inverse = self._power_tables(int(counts.max(initial=0)) + 1)
        for i in np.flatnonzero(~single):
            tokens = slice(int(starts[i]), int(starts[i] + counts[i]))
            scaled = _A * mix64(plan.token_ids[tokens], plan.positions[tokens])
            terms = np.concatenate((sums[i : i + 1], inverse[1 : counts[i] + 1] * scaled))
            running = power[: counts[i] + 1] * np.cumsum(terms, dtype=np.uint64)
            self.cells[plan.write_slots[tokens]] = np.diff(running)
            after[i] = running[-1]
        return after

    def _power_tables(self, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        if len(self._powers[0]) < count:
            size = 2 * count
            exponents = [np.full(size, base, np.uint64) for base in (_K, _K_INVERSE)]
            for table in exponents:
                table[0] = 1
            self._powers = np.cumprod(exponents[0], dtype=np.uint64), np.cumprod(exponents[1], dtype=np.uint64)
        return self._powers


def _scores(contexts: NDArray[np.uint64], tokens: NDArray[np.int32], num_top: int) -> TokenScores:
    """Of a token after what could be read there; the tokens named as likeliest are as much of a hash."""
    top = np.arange(num_top, dtype=np.int32)[None, :].repeat(len(tokens), axis=0)
    top_logprobs = -np.sort(uniform(contexts[:, None], top), axis=1)
    return TokenScores(-uniform(contexts, tokens), np.ones(len(tokens), np.int32), top, top_logprobs)
