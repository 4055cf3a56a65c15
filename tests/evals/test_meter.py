"""Blocks that sequences hold, counted from plans by hand."""

from __future__ import annotations

from tests.plans import Lane, Slice, draws, make_plan
from vtoken.evals.meter import Held, Meter
from vtoken.executor.sim import SimExecutor


def test_blocks_are_weighed_by_the_tokens_that_are_computed_in_them() -> None:
    meter = Meter(SimExecutor(num_blocks=16, block_size=4))
    reader = Lane(4, [1, 2, 3])  # three blocks, the last one not written yet
    talker = Lane(4, [4, -1, 5], past={0: 0, 8: 7})  # one came back to the pool
    plan = make_plan(
        [Slice(reader, [7, 7, 7, 7, 7, 7]), Slice(talker, [7], rows=[1])], sampling=draws([0, 1], indices=[0, 3])
    )
    meter.execute(plan)
    assert meter.read() == Held(reading=3.0, answering=2.0, peak=3)
    meter.execute(make_plan([Slice(Lane(4, [6]), [7, 7])], sampling=draws([]), step=1))
    assert meter.read() == Held(reading=(6 * 3 + 2 * 1) / 8, answering=2.0, peak=3)
    meter.reset()
    assert meter.read() == Held(None, None, 0)


def test_the_first_token_of_an_answer_is_drawn_while_the_prompt_is_read() -> None:
    meter = Meter(SimExecutor(num_blocks=16, block_size=4))
    meter.execute(make_plan([Slice(Lane(4, [1]), [7, 7])], sampling=draws([0], indices=[0])))
    assert meter.read() == Held(1.0, None, 1)


def test_a_plan_of_copies_alone_counts_nothing() -> None:
    meter = Meter(SimExecutor(num_blocks=4, block_size=4))
    meter.execute(make_plan([], block_size=4, sampling=draws([])))
    assert meter.read() == Held(None, None, 0)
