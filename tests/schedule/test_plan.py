"""What a `StepPlan` says: slices, cells, masks of the past, draws; and that it is a snapshot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.driving import Driver, evict_scattered, tokens
from vtoken.base.clock import ManualClock
from vtoken.base.rope_lengths import RopeLengths
from vtoken.memory import bits
from vtoken.policies.h2o import H2O
from vtoken.policies.statistics import Sum
from vtoken.schedule.plan import StepPlan
from vtoken.schedule.retention import RetentionSettings
from vtoken.schedule.scheduler import Scheduler


def next_plan(driver: Driver) -> StepPlan:
    driver.keep_plans = True
    driver.step()
    return driver.plans[-1]


def visible_slots(plan: StepPlan, s: int) -> set[int]:
    slots = plan.block_tables[s, :, None] * plan.block_size + np.arange(plan.block_size)
    return set(slots.reshape(-1)[bits.unpack(plan.masks[s], plan.block_size)].tolist())


def test_the_first_step_of_a_prompt() -> None:
    driver = Driver(block_size=16, num_blocks=8, max_num_batched_tokens=64)
    prompt = tokens(20, 1)
    driver.add(prompt, 4)
    plan = next_plan(driver)
    assert (plan.step, plan.block_size, plan.num_slices, plan.num_tokens) == (0, 16, 1, 20)
    assert plan.copies == ()
    assert plan.starts.tolist() == [0, 20]
    assert plan.token_ids.tolist() == prompt
    assert plan.positions.tolist() == plan.write_rows.tolist() == list(range(20))
    assert plan.write_slots.tolist() == [*range(20)]  # blocks 0 and 1
    assert plan.past_live.tolist() == [0]
    assert visible_slots(plan, 0) == set()
    assert plan.sampling.slices.tolist() == [0]
    assert plan.row_positions is None
    assert plan.statistics == ()


def test_a_decode_step_after_it() -> None:
    driver = Driver(block_size=16, num_blocks=8)
    request = driver.add(tokens(20, 1), 4)
    driver.step()
    plan = next_plan(driver)
    assert plan.token_ids.tolist() == request.sequences[0].output_token_ids[:1]
    assert plan.positions.tolist() == [20]
    assert plan.past_live.tolist() == [20]
    assert visible_slots(plan, 0) == set(range(20))
    assert plan.write_slots.tolist() == [20]


def test_a_chunk_that_does_not_end_the_prompt_draws_nothing() -> None:
    driver = Driver(block_size=16, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=8)
    driver.add(tokens(20, 1), 4)
    plans = [next_plan(driver) for _ in range(3)]
    assert [plan.num_tokens for plan in plans] == [8, 8, 4]
    assert [plan.past_live.tolist() for plan in plans] == [[0], [8], [16]]
    assert [len(plan.sampling) for plan in plans] == [0, 0, 1]


def test_parameters_of_a_draw_are_the_requests() -> None:
    driver = Driver()
    driver.add(tokens(5, 1), 4, seed=-1, temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1)
    driver.add(tokens(5, 2), 4, seed=2**64 - 2, temperature=1.0, top_k=5, n=3)
    first, second = next_plan(driver).sampling, next_plan(driver).sampling
    assert first.slices.tolist() == [0, 1, 1, 1]
    assert second.slices.tolist() == [0, 1, 2, 3]
    for batch in (first, second):
        assert batch.temperature.tolist() == pytest.approx([0.7, 1, 1, 1])
        assert batch.top_k.tolist() == [0, 5, 5, 5]
        assert batch.top_p.tolist() == pytest.approx([0.9, 1, 1, 1])
        assert batch.min_p.tolist() == pytest.approx([0.1, 0, 0, 0])
        assert batch.seeds.tolist() == [2**64 - 1, *[2**64 - 2] * 3]
        assert batch.choices.tolist() == [0, 0, 1, 2]
    assert first.indices.tolist() == [0, 0, 0, 0]
    assert second.indices.tolist() == [1, 1, 1, 1]


def test_masks_are_of_the_past_and_holes_are_filled_first() -> None:
    dead = {3, 7, 11}
    driver = Driver(block_size=16, num_blocks=8, evictor=lambda sequence, length: sorted(dead) if length == 20 else ())
    driver.add(tokens(20, 1), 4)
    driver.step()
    plan = next_plan(driver)
    assert plan.past_live.tolist() == [17]
    assert visible_slots(plan, 0) == set(range(20)) - dead
    assert plan.positions.tolist() == [20]
    # Block 0 is published, so the tail of block 1 comes before the holes of block 0.
    assert plan.write_rows.tolist() == [20]


def test_row_positions_are_given_where_rows_are_out_of_order() -> None:
    driver = Driver(
        block_size=8,
        num_blocks=8,
        enable_prefix_caching=False,
        evictor=lambda sequence, length: [2, 5] if length == 10 else (),
    )
    driver.scheduler = Scheduler(driver.scheduler.config, driver.memory, ManualClock(), row_positions=True)
    driver.add(tokens(10, 1), 5)
    assert next_plan(driver).row_positions is None
    assert next_plan(driver).write_rows.tolist() == [2]
    assert next_plan(driver).write_rows.tolist() == [5]
    plan = next_plan(driver)
    assert plan.row_positions.shape == (1, 16)
    assert plan.row_positions[0, :10].tolist() == [0, 1, 10, 3, 4, 11, 6, 7, 8, 9]


COLLECTS = RetentionSettings(H2O(), budget=1_000_000, trigger="always")  # asks for attention, and lets nothing die
ATTENTION = Sum().name


def test_statistics_of_a_policy_are_ordered_and_entered() -> None:
    driver = Driver(retention=COLLECTS, num_blocks=8)
    driver.add(tokens(20, 1), 3)
    [order] = next_plan(driver).statistics
    assert (order.statistic, order.slices.tolist(), order.first.tolist()) == (Sum(), [0], [0])
    lane = driver.requests[0].lanes[0]
    before = driver.memory.tokens.columns[ATTENTION][lane, :20].sum()
    driver.step()
    assert driver.memory.tokens.columns[ATTENTION][lane, :20].sum() > before > 0


def statistics_by_position(num_blocks: int) -> tuple[dict[tuple[str, int, int], float], Driver]:
    """What each token has collected when its sequence ends, with evictions on the way."""
    evict = evict_scattered(1000, 70)
    driver = Driver(
        retention=COLLECTS,
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        # The even ones are left with holes all over, the odd ones grow and need blocks.
        evictor=lambda sequence, length: evict(sequence, length) if sequence.request.index % 2 == 0 else (),
    )
    for i in range(4):
        driver.add(tokens(60, i) if i % 2 == 0 else tokens(9, i), 12, n=1 + i % 2)
    collected: dict[tuple[str, int, int], float] = {}
    while driver.scheduler.num_unfinished:
        driver.step()
        for request in driver.scheduler.running:
            for sequence in request.unfinished:
                if sequence.lane is not None:
                    rows, positions = driver.memory.tokens.live(sequence.lane)
                    values = driver.memory.tokens.columns[ATTENTION][sequence.lane, rows]
                    name = (request.request_id, sequence.choice)
                    collected |= {(*name, p): v for p, v in zip(positions.tolist(), values.tolist(), strict=True)}
    driver.check_outputs()
    return collected, driver


def test_statistics_follow_their_tokens_through_moves_and_forks() -> None:
    roomy, _ = statistics_by_position(400)
    tight, driver = statistics_by_position(37)
    assert driver.memory.counters.tokens_relocated > 0
    assert driver.counters.preemptions == 0
    assert tight.keys() == roomy.keys()
    assert list(tight.values()) == pytest.approx([roomy[key] for key in tight], rel=1e-4)


def in_a_plan(plan: StepPlan, visit: Callable[[np.ndarray], object]) -> None:
    for owner in (plan, plan.sampling, *plan.copies):
        for value in vars(owner).values():
            if isinstance(value, np.ndarray):
                visit(value)


def test_slices_say_what_their_sequences_turn_by() -> None:
    """Prompt and `max_tokens`, as clamped; the same in every chunk, for every choice and after a preemption."""
    driver = Driver(
        block_size=4,
        num_blocks=24,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=60,
        kv={"rope_lengths": RopeLengths(20)},
        keep_plans=True,
    )
    totals = {1: (10, 10), 2: (10, 11), 3: (30, 9), 4: (18, 1000)}
    requests = [driver.add(tokens(prompt, key), new, seed=key) for key, (prompt, new) in totals.items()]
    requests.append(driver.add(tokens(10, 5), 30, n=2, seed=5))
    driver.run()
    expected = [20, 21, 39, 60, 40]
    assert [request.rope_length for request in requests] == expected
    assert driver.counters.preemptions > 0
    seen = set()
    for plan in driver.plans:
        assert plan.rope_lengths is not None
        assert plan.rope_lengths.shape == (plan.num_slices,)
        for s in range(plan.num_slices):
            first, length = int(plan.positions[plan.starts[s]]), int(plan.rope_lengths[s])
            if first < 10:
                which = [tokens(10, key)[first] for key in (1, 2, 3, 4, 5)].index(int(plan.token_ids[plan.starts[s]]))
                assert length == expected[which]
            seen.add(length)
    assert seen == set(expected)


def test_models_that_turn_all_alike_cost_nothing() -> None:
    driver = Driver(block_size=4, num_blocks=8)
    request = driver.add(tokens(10, 1), 4)
    assert request.rope_length is None
    assert next_plan(driver).rope_lengths is None


def test_plans_are_snapshots() -> None:
    """Whatever the books do later, no array of an earlier plan changes."""
    driver = Driver(
        block_size=4,
        num_blocks=20,
        num_host_blocks=20,
        preemption="swap",
        max_num_batched_tokens=32,
        keep_plans=True,
        evictor=evict_scattered(8, 30),
    )
    for i in range(5):
        driver.add(tokens(9, i), 24, n=1 + i % 2)
    kept: list[list[np.ndarray]] = []
    while driver.scheduler.num_unfinished:
        driver.step()
        arrays: list[np.ndarray] = []
        in_a_plan(driver.plans[-1], lambda array, arrays=arrays: arrays.append(array.copy()))
        kept.append(arrays)
    assert driver.counters.preemptions_swap > 0
    assert driver.memory.counters.blocks_copied_on_write > 0
    for plan, before in zip(driver.plans, kept, strict=True):
        now: list[np.ndarray] = []
        in_a_plan(plan, now.append)
        assert all((a == b).all() for a, b in zip(now, before, strict=True))
        for array in now:
            for book in (driver.memory.blocks.ids, driver.memory.blocks.masks, driver.memory.tokens.positions):
                assert not np.shares_memory(array, book)


def test_plans_are_frozen() -> None:
    driver = Driver()
    driver.add(tokens(5, 1), 2)
    plan = next_plan(driver)
    with pytest.raises(AttributeError):
        plan.step = 7  # type: ignore[misc]
