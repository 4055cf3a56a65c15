"""V8: attention never reads an unfinished copy: ordered copies come before it, beside-copies are mapped only when
ended; the wait is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.plans import Lane, Slice, make_plan
from tests.worker.fake_model import FakeModel
from vtoken.executor.local import LocalExecutor
from vtoken.memory.copy import Copy, CopyKind
from vtoken.planner.kv_memory import KVShape

PAUSE = 0.05  # s that a copy is made to take


@pytest.fixture(params=["reference", "cpu"])
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalExecutor]:
    """Its copies take a while."""
    model = FakeModel()
    shape = KVShape(model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim, "float32")
    executor = LocalExecutor(model, num_blocks=30, block_size=4, attention_backend=request.param, kv_shape=shape)
    copy = executor.copies._copy

    def slow(what: Copy) -> None:
        time.sleep(PAUSE)
        copy(what)

    monkeypatch.setattr(executor.copies, "_copy", slow)
    yield executor
    executor.close()


def compute(executor: LocalExecutor, table: list[int], length: int = 12) -> tuple[Lane, int]:
    lane = Lane(4, table)
    part = Slice(lane, list(range(length)))
    token = int(executor.execute(make_plan([part])).tokens[0])
    part.commit()
    return lane, token


def moved(lane: Lane, table: list[int], ticket: int | None = None) -> tuple[Lane, Copy]:
    rows = list(lane.past)
    there = Lane(4, table, dict(lane.past))
    return there, Copy(CopyKind.RELOCATE, lane.slots(rows), there.slots(rows), ticket)


def next_token(executor: LocalExecutor, lane: Lane, token: int, *copies: Copy) -> int:
    return int(executor.execute(make_plan([Slice(lane, [token])], copies=copies)).tokens[0])


def test_ordered_copies_are_done_before_attention_and_the_wait_is_measured(executor: LocalExecutor) -> None:
    lane, token = compute(executor, [0, 1, 2, 3])
    expected = next_token(executor, lane, token)
    assert executor.copies.seconds_waited == pytest.approx(0.0, abs=PAUSE / 2)
    there, copy = moved(lane, [9, 7, 8, 5])
    for block in (0, 1, 2):  # whatever the old place holds by then
        for tensor in executor.store.tensors:
            assert not torch.isnan(tensor[block]).any()
    assert next_token(executor, there, token, copy) == expected
    assert executor.copies.seconds_waited >= PAUSE


def test_a_copy_beside_holds_no_step_up_and_is_read_when_it_has_ended(executor: LocalExecutor) -> None:
    gate, copy = threading.Event(), executor.copies._copy

    def gated(what: Copy) -> None:
        gate.wait(10)
        copy(what)

    executor.copies._copy = gated  # type: ignore[method-assign]
    lane, token = compute(executor, [0, 1, 2, 3])
    expected = next_token(executor, lane, token)
    there, order = moved(lane, [9, 7, 8, 5], ticket=3)
    plan = make_plan([Slice(lane, [token])], copies=[order])
    results = [executor.execute(plan), *(executor.execute(make_plan([Slice(lane, [token])])) for _ in range(3))]
    assert [result.ended for result in results] == [()] * 4, "it cannot have ended"
    assert [int(result.tokens[0]) for result in results] == [expected] * 4, "the old place is read meanwhile"
    assert executor.copies.seconds_waited < PAUSE
    gate.set()
    deadline = time.monotonic() + 10
    while executor.execute(make_plan([Slice(lane, [token])])).ended != (3,):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    rows = np.array([0, 1, 2])
    for tensor in executor.store.tensors:
        tensor[rows] = torch.nan if tensor.is_floating_point() else 0  # the old place is somebody else's
    assert next_token(executor, there, token) == expected
