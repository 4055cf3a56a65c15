"""V15: what a runtime has to offer for eviction to be carried into it, as one suite that every runtime of ours passes.

It needs blocks that are handed out and taken back at will, a map that is what attention reads from the step on in which
it came, copies done before anything reads them, and copies beside the steps whose end is told. Nothing here knows how a
runtime keeps its cells: it only sees plans and what is drawn from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.plans import Lane, Slice, make_plan
from tests.worker.fake_model import FakeModel
from vtoken.executor.base import Executor
from vtoken.executor.local import LocalExecutor
from vtoken.executor.sim import SimExecutor
from vtoken.memory.copy import Copy, CopyKind
from vtoken.planner.kv_memory import KVShape

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 80, 8
TEXT = [5, 3, 8, 1, 9, 7, 2, 6, 4, 11, 12, 10]
ANSWER = 6


def _sim() -> Executor:
    return SimExecutor(NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS, vocab_size=2**31 - 1, beside_delay=2)


def _local(backend: str) -> Executor:
    model = FakeModel()
    shape = KVShape(model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim, "float32")
    return LocalExecutor(
        model,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_host_blocks=NUM_HOST_BLOCKS,
        attention_backend=backend,
        kv_shape=shape,
    )


RUNTIMES: dict[str, Callable[[], Executor]] = {
    "simulated": _sim,
    "torch": lambda: _local("reference"),
    "compiled": lambda: _local("cpu"),
}


@dataclass
class Runtime:
    """A runtime and its step counter."""

    executor: Executor
    step: int = 0

    def run(self, *slices: Slice, copies: tuple[Copy, ...] = ()) -> tuple[list[int], tuple[int, ...]]:
        """What is drawn after each slice, and the copies beside the steps that have ended."""
        plan = make_plan(slices, block_size=BLOCK_SIZE, copies=copies, step=self.step)
        self.step += 1
        result = self.executor.execute(plan)
        assert (result.errors, result.failed) == ({}, ())
        for part in slices:
            part.commit()
        return result.tokens.tolist(), result.ended

    def read(self, lane: Lane, text: list[int]) -> int:
        """Compute a text in one go; its first answer token."""
        return self.run(Slice(lane, text))[0][0]

    def answer(self, lane: Lane, first: int, count: int = ANSWER) -> list[int]:
        tokens = [first]
        while len(tokens) < count:
            tokens += self.run(Slice(lane, tokens[-1:], lane.next_position, [max(lane.past) + 1]))[0]
        return tokens


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    executor = RUNTIMES[request.param]()
    yield Runtime(executor)
    executor.close()


def slots(*blocks: int) -> np.ndarray:
    return (BLOCK_SIZE * np.array(blocks)[:, None] + np.arange(BLOCK_SIZE)).ravel()


def kill(lane: Lane, positions: set[int]) -> None:
    lane.past = {row: position for row, position in lane.past.items() if position not in positions}


DEAD = {1, 2, 5, 6, 7, 9}


def survivors(runtime: Runtime, table: list[int]) -> tuple[Lane, int]:
    """A text that has lost DEAD once it was computed."""
    lane = Lane(BLOCK_SIZE, table)
    first = runtime.read(lane, TEXT)
    kill(lane, DEAD)
    return lane, first


def packed(lane: Lane, fresh: list[int], ticket: int | None = None) -> tuple[Lane, Copy]:
    """The same live tokens in other blocks, in another order, and the copy that brings them there."""
    rows = sorted(lane.past, reverse=True)
    moved = Lane(BLOCK_SIZE, fresh, {new: lane.past[old] for new, old in enumerate(rows)})
    return moved, Copy(CopyKind.RELOCATE, lane.slots(rows), moved.slots(range(len(rows))), ticket)


def test_any_block_will_do(runtime: Runtime) -> None:
    answers = []
    for table in ([0, 1, 2, 3, 4], [17, 3, 22, 9, 11]):
        lane = Lane(BLOCK_SIZE, table)
        answers.append(runtime.answer(lane, runtime.read(lane, TEXT)))
    assert answers[0] == answers[1]


def test_a_block_that_comes_back_brings_nothing_along(runtime: Runtime) -> None:
    clean = Lane(BLOCK_SIZE, [0, 1, 2, 3, 4])
    expected = runtime.answer(clean, runtime.read(clean, TEXT))
    runtime.read(Lane(BLOCK_SIZE, [5, 6, 7, 8, 9]), [13] * 20)  # its owner ends; its blocks are handed out again
    lane = Lane(BLOCK_SIZE, [8, 6, 5, 9, 7])
    assert runtime.answer(lane, runtime.read(lane, TEXT)) == expected


def test_the_dead_are_not_read_and_their_cells_may_be_written(runtime: Runtime) -> None:
    lane, first = survivors(runtime, [0, 1, 2, 3, 4])
    expected = runtime.answer(lane, first)
    other, first = survivors(runtime, [5, 6, 7])
    holes = [row for row in range(len(TEXT)) if row not in other.past]
    tokens = [first]
    for hole in holes[: ANSWER - 1]:
        tokens += runtime.run(Slice(other, tokens[-1:], other.next_position, [hole]))[0]
    assert tokens == expected


def test_a_new_map_is_read_in_the_step_it_comes_with_and_its_copies_run_before(runtime: Runtime) -> None:
    lane, first = survivors(runtime, [0, 1, 2, 3, 4])
    expected = runtime.answer(lane, first)
    lane, first = survivors(runtime, [5, 6, 7])
    moved, copy = packed(lane, [9, 10, 11, 12])
    rubbish = Slice(Lane(BLOCK_SIZE, [5, 6, 7]), [13] * 12)  # somebody else has the old blocks in this very step
    drawn, _ = runtime.run(Slice(moved, [first], moved.next_position, [max(moved.past) + 1]), rubbish, copies=(copy,))
    assert runtime.answer(moved, drawn[0], ANSWER - 1) == expected[1:]


def test_a_copy_beside_the_steps_is_told_when_it_has_ended_and_may_be_read_then(runtime: Runtime) -> None:
    lane, first = survivors(runtime, list(range(40, 60)))
    expected = runtime.answer(lane, first, 60)
    lane, first = survivors(runtime, [5, 6, 7, *range(13, 33)])
    moved, copy = packed(lane, [9, 10, 11, 12], ticket=7)
    tokens, copies, ended = [first], (copy,), ()
    while not ended and len(tokens) < 40:  # the old map is good until the end is told
        drawn, ended = runtime.run(Slice(lane, tokens[-1:], lane.next_position, [max(lane.past) + 1]), copies=copies)
        tokens, copies = tokens + drawn, ()
        time.sleep(0.01)
    assert ended == (7,), "told once, by its ticket"
    # What was written meanwhile stays where it is; what was moved is read in its new place.
    shift = (len(moved.block_table) - 3) * BLOCK_SIZE
    joined = Lane(BLOCK_SIZE, [*moved.block_table, *lane.block_table[3:]], dict(moved.past))
    joined.past |= {row + shift: position for row, position in lane.past.items() if row >= len(TEXT)}
    runtime.read(Lane(BLOCK_SIZE, [5, 6, 7]), [13] * 12)  # the emptied blocks are somebody else's
    assert runtime.answer(joined, tokens[-1], 50 - len(tokens) + 1) == expected[len(tokens) - 1 : 50]
    assert runtime.run()[1] == ()


def test_blocks_come_back_from_the_host_as_they_went(runtime: Runtime) -> None:
    lane, first = survivors(runtime, [0, 1, 2, 3, 4])
    expected = runtime.answer(lane, first)
    lane, first = survivors(runtime, [5, 6, 7])
    runtime.run(copies=(Copy(CopyKind.SWAP_OUT, slots(5, 6, 7), slots(3, 0, 6)),))
    runtime.read(Lane(BLOCK_SIZE, [5, 6, 7]), [13] * 12)
    back = Lane(BLOCK_SIZE, [9, 20, 14, 15, 16], lane.past)
    swap_in = Copy(CopyKind.SWAP_IN, slots(3, 0, 6), slots(9, 20, 14))
    drawn, _ = runtime.run(Slice(back, [first], back.next_position, [len(TEXT)]), copies=(swap_in,))
    assert runtime.answer(back, drawn[0], ANSWER - 1) == expected[1:]


def test_it_matters_what_is_read(runtime: Runtime) -> None:
    """The suite would pass on a runtime that reads nothing: this one may not."""
    lane, first = survivors(runtime, [0, 1, 2, *range(10, 24)])
    evicted = runtime.answer(lane, first, 40)
    whole = Lane(BLOCK_SIZE, [5, 6, 7, *range(10, 24)])
    assert runtime.answer(whole, runtime.read(whole, TEXT), 40) != evicted
    lane, first = survivors(runtime, [0, 1, 2, *range(10, 24)])
    moved, _ = packed(lane, [5, 6, 3, 4, *range(10, 20)])  # a map without its copy
    assert runtime.answer(moved, first, 40) != evicted
