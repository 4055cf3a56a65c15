from __future__ import annotations

import numpy as np
import pytest

from tests.plans import Lane, Slice, make_plan, order
from vtoken.bench.devices import Device
from vtoken.bench.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, Roofline
from vtoken.bench.shapes import SHAPES, ModelShape
from vtoken.memory.copy import Copy, CopyKind
from vtoken.policies.statistics import KeyNorm, Sum
from vtoken.schedule.plan import StepPlan

# 2 layers, 4 heads of 8, 2 KV heads: 128 bytes of KV a token; 2,000 bytes of weights.
SHAPE = ModelShape(2, 4, 2, 8, 1_000, 4096)
SLOW_MEMORY = Device(1e15 / COMPUTE_EFFICIENCY, 1e3 / MEMORY_EFFICIENCY, 10**9, 10 / MEMORY_EFFICIENCY)
SLOW_MATHS = Device(1e3 / COMPUTE_EFFICIENCY, 1e15 / MEMORY_EFFICIENCY, 10**9, 1e9)


def plan(counts: list[int], past: list[int], **more: object) -> StepPlan:
    """Slices of so many tokens, each of which sees so many past ones."""
    lanes = [Lane(8, list(range(8 * i, 8 * i + 8)), {row: row for row in range(n)}) for i, n in enumerate(past)]
    slices = [Slice(lane, [0] * count) for lane, count in zip(lanes, counts, strict=True)]
    return make_plan(slices, **more)  # type: ignore[arg-type]


def test_shapes_have_the_kv_bytes_of_their_models() -> None:
    assert SHAPES["llama-3.1-8b"].kv.bytes_per_token == 131_072
    assert SHAPES["qwen2.5-14b"].kv.bytes_per_token == 2 * 48 * 8 * 128 * 2
    assert SHAPES["llama-3.1-8b"].weight_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert SHAPE.kv.bytes_per_token == 2 * 2 * 2 * 8 * 2 == 128


def test_a_decode_step_reads_the_weights_once_and_each_live_token_once() -> None:
    seconds = Roofline(SHAPE, SLOW_MEMORY).seconds(plan([1, 1], [10, 30]))
    # 2,000 of weights, 40 tokens read and 2 written, at 1,000 bytes a second
    assert seconds.forward == pytest.approx((2_000 + 42 * 128) / 1e3)
    assert seconds.copies == 0


def test_a_prompt_takes_its_products() -> None:
    seconds = Roofline(SHAPE, SLOW_MATHS).seconds(plan([4], [3]))
    pairs = 4 * 3 + (1 + 2 + 3 + 4)
    assert seconds.forward == pytest.approx((2 * 1_000 * 4 + 4 * 2 * 4 * 8 * pairs) / 1e3)


def test_copies_are_read_and_written_and_those_beside_the_steps_take_no_time() -> None:
    slots = np.arange(5)
    ordered, beside = Copy(CopyKind.RELOCATE, slots, slots + 5), Copy(CopyKind.RELOCATE, slots, slots + 5, ticket=1)
    roofline = Roofline(SHAPE, SLOW_MEMORY)
    assert roofline.seconds(plan([1], [1], copies=(ordered,))).copies == pytest.approx(2 * 5 * 128 / 1e3)
    assert roofline.seconds(plan([1], [1], copies=(beside,))).copies == 0
    swap = Copy(CopyKind.SWAP_OUT, slots, slots)
    assert roofline.seconds(plan([1], [1], copies=(swap,))).copies == pytest.approx(5 * 128 / 10)


def test_gathering_attention_moves_a_number_a_layer_and_token_twice() -> None:
    roofline = Roofline(SHAPE, SLOW_MEMORY)
    plain = roofline.seconds(plan([1, 1], [10, 30]))
    more = roofline.seconds(plan([1, 1], [10, 30], statistics=[order(Sum(), [1])]))
    assert more.forward - plain.forward == pytest.approx(8 * 2 * 31 / 1e3)
    assert roofline.seconds(plan([1, 1], [10, 30], statistics=[order(KeyNorm(), [1])])) == plain
