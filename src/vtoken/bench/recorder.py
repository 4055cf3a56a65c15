"""`Recorder`: what a run looked like, step by step and sequence by sequence, taken from the books as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vtoken.bench.roofline import StepSeconds
from vtoken.bench.slot_map import SlotMap, SlotWatch
from vtoken.memory import bits
from vtoken.memory.block_table import EMPTY
from vtoken.memory.copy import CopyKind
from vtoken.schedule.plan import StepPlan
from vtoken.schedule.scheduler import Scheduler
from vtoken.schedule.sequence import Sequence

STEP: Final = np.dtype(
    [
        ("time", np.float64),  # s, the run's clock when the step was over
        ("taken", np.float64),  # s, the step with its copies, and the host's part where that is on the run's clock
        ("forward", np.float64),  # s, the step without its copies
        ("copies", np.float64),  # s that the step waited for copies
        ("planning", np.float64),  # s of host time in `schedule()`
        ("applying", np.float64),  # s of host time in `apply()`
        ("tokens", np.int64),  # that went through the model
        ("drawn", np.int64),
        ("is_decode", np.bool_),  # each slice one token that is drawn from
        ("running", np.int64),  # requests
        ("is_short", np.bool_),  # somebody waits for blocks after all that was tried
        ("held", np.int64),  # blocks that are neither free nor merely cached
        ("floor", np.int64),  # blocks that the live tokens need, each sequence by itself
        ("partly", np.int64),  # held blocks in which some cells live and some do not
        ("live", np.int64),  # tokens
        ("holes", np.int64),  # dead cells below the last used one of their block
        ("tail", np.int64),  # cells for tokens to come
        ("relocated", np.int64),  # tokens
        ("preemptions", np.int64),  # since the start
        ("evicted", np.int64),  # tokens, since the start
    ]
)
SAMPLE: Final = np.dtype(
    [
        ("request", np.int64),  # number of the job
        ("length", np.int64),  # tokens of the text, the one of this step included
        ("held", np.int64),  # blocks
        ("unused", np.int64),  # of the held blocks: nothing was ever in them, they are for tokens to come
        ("live", np.int64),  # tokens
        ("is_short", np.bool_),  # see above
        ("is_drained", np.bool_),  # reclaim was asked in this step and could give no more than it gave
    ]
)


@dataclass(frozen=True)
class Recording:
    """A finished run as arrays.

    `samples` has an entry for each step and sequence whose answer grew in it, taken when the step was planned: dead
    blocks and packed ones have been returned by then, and the cells of the step's own tokens are given out.
    """

    block_size: int
    num_blocks: int
    steps: NDArray[np.void]  # [steps]
    samples: NDArray[np.void]  # [samples]
    token_gaps: NDArray[np.float64]  # s from one token of an answer to the next, all requests
    first_token_seconds: NDArray[np.float64]  # s from a request's arrival to its first token
    occupancy: NDArray[np.int64]  # [block_size + 1] (held block, step) pairs by live tokens in the block
    peak_occupancy: NDArray[np.int64]  # the same when most blocks were held
    peak_running: int  # most requests at once
    unpreempted_running: int  # the same up to the first preemption
    slot_map: SlotMap | None  # the pool before and after the reclaim that returned most blocks

    @property
    def floors(self) -> NDArray[np.int64]:
        """[samples] blocks that the live tokens need."""
        floors: NDArray[np.int64] = -(-self.samples["live"] // self.block_size)
        return floors


class Recorder:
    """Told of each step twice: when it is planned, and when its result has been entered."""

    def __init__(self, scheduler: Scheduler, *, pictures: bool) -> None:
        self.num_requests = 0  # added so far, by whoever drives the scheduler
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._steps: list[tuple[object, ...]] = []
        self._samples: list[NDArray[np.void]] = []
        self._gaps: list[float] = []
        self._first: list[float] = []
        self._last_token: dict[Sequence, float] = {}
        size = self._memory.block_size
        self._occupancy = np.zeros(size + 1, np.int64)
        self._peak_occupancy = np.zeros(size + 1, np.int64)
        self._peak_held = self._peak_running = self._unpreempted = 0
        self._watch = SlotWatch(scheduler) if pictures else None
        self._num_decisions = 0
        self._planned: tuple[float, ...] = ()

    def before(self) -> None:
        """A step is about to be planned."""
        if self._watch is not None:
            self._watch.before()

    def planned(self, plan: StepPlan, seconds: float) -> None:
        """A step has been planned, which took so long, and its result is not there yet."""
        scheduler, memory = self._scheduler, self._memory
        relocated = sum(len(copy) for copy in plan.copies if copy.kind is CopyKind.RELOCATE)
        if self._watch is not None and relocated:
            self._watch.after()
        running = scheduler.running
        is_waiting = scheduler.num_waiting + scheduler.num_preempted > 0
        limits = scheduler.config
        is_short = is_waiting and len(running) < limits.max_num_seqs and plan.num_tokens < limits.max_num_batched_tokens
        cells = self._sample(running_sequences(scheduler), is_short, self._is_drained())
        self._peak_running = max(self._peak_running, len(running))
        if scheduler.counters.preemptions == 0:
            self._unpreempted = self._peak_running
        self._planned = (
            seconds,
            plan.num_tokens,
            len(plan.sampling),
            len(plan.sampling) == plan.num_slices == plan.num_tokens,
            len(running),
            is_short,
            memory.num_held,
            *cells,
            relocated,
        )

    def applied(
        self, drawn: Iterable[tuple[Sequence, int]], now: float, took: StepSeconds, seconds: float, *, counts_host: bool
    ) -> None:
        """The step is over at `now`: what it took, and how long its result took to enter. `counts_host`: planning and
        entering are on the run's clock."""
        planning, *facts = self._planned
        taken = took.total + (planning + seconds if counts_host else 0.0)
        counters = self._scheduler.counters
        totals = (counters.preemptions, self._memory.counters.tokens_evicted)
        self._steps.append((now, taken, took.forward, took.copies, planning, seconds, *facts, *totals))
        for sequence, _ in drawn:
            last = self._last_token.get(sequence)
            if last is None:
                self._first.append(now - sequence.request.arrival_time)
            else:
                self._gaps.append(now - last)
            self._last_token[sequence] = now

    def recording(self) -> Recording:
        return Recording(
            block_size=self._memory.block_size,
            num_blocks=self._memory.pool.num_blocks,
            steps=np.array(self._steps, STEP),
            samples=np.concatenate(self._samples) if self._samples else np.empty(0, SAMPLE),
            token_gaps=np.array(self._gaps),
            first_token_seconds=np.array(self._first),
            occupancy=self._occupancy,
            peak_occupancy=self._peak_occupancy,
            peak_running=self._peak_running,
            unpreempted_running=self._unpreempted,
            slot_map=self._watch.best if self._watch is not None else None,
        )

    def _is_drained(self) -> bool:
        """Whether this step has asked all sequences for blocks and got fewer than it wanted: all that could come."""
        log = self._memory.decisions
        num_new = sum(log.counts.values()) - self._num_decisions
        self._num_decisions += num_new
        latest = list(log)[-num_new:] if num_new else []
        # Decisions at the places of a text are about that sequence alone.
        return any(
            one.trigger == "pressure" and one.blocks_wanted is not None and one.blocks_returned < one.blocks_wanted
            for one in latest
        )

    def _sample(self, sequences: list[Sequence], is_short: bool, is_drained: bool) -> tuple[int, ...]:
        """Note the sequences whose answer grows, and how full blocks are. Returns, over all sequences, none of which
        shares a block: the sum of their floors, blocks partly used, live tokens, holes and tail slack."""
        memory, size = self._memory, self._memory.block_size
        lanes = np.array([sequence.lane for sequence in sequences], np.int64)
        if not len(lanes):
            return 0, 0, 0, 0, 0
        num_entries = int(memory.blocks.num_entries[lanes].max())
        is_held = memory.blocks.ids[lanes, :num_entries] != EMPTY
        counts = bits.count(memory.blocks.masks[lanes, :num_entries])[is_held]
        rows = memory.tokens.num_rows[lanes][:, None] - np.arange(num_entries) * size
        used = np.clip(rows, 0, size)[is_held]
        unused = (is_held & (rows <= 0)).sum(axis=1)
        occupancy = np.bincount(counts, minlength=size + 1)
        self._occupancy += occupancy
        if memory.num_held > self._peak_held:
            self._peak_held, self._peak_occupancy = memory.num_held, occupancy
        lengths, live = memory.tokens.lengths[lanes], memory.tokens.num_live[lanes]
        known = np.array([len(sequence.token_ids) for sequence in sequences])
        prompts = np.array([sequence.request.num_prompt_tokens for sequence in sequences])
        grows = (lengths == known) & (lengths > prompts)
        samples = np.empty(int(grows.sum()), SAMPLE)
        samples["request"] = np.array([sequence.request.index for sequence in sequences])[grows]
        samples["length"] = lengths[grows]
        samples["held"] = is_held.sum(axis=1)[grows]
        samples["unused"] = unused[grows]
        samples["live"] = live[grows]
        samples["is_short"], samples["is_drained"] = is_short, is_drained
        self._samples.append(samples)
        num_live, num_used = int(counts.sum()), int(used.sum())
        partly = int(((counts > 0) & (counts < size)).sum())
        return int((-(-live // size)).sum()), partly, num_live, num_used - num_live, size * len(counts) - num_used


def running_sequences(scheduler: Scheduler) -> list[Sequence]:
    """The sequences that have blocks on the device."""
    return [s for request in scheduler.running for s in request.sequences if s.lane is not None]
