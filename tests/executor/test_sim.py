"""The simulator itself: what it answers depends on every cell, token and position a query may read, and on nothing
else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.driving import expected_output, mix, tokens
from tests.plans import Lane, Slice, draws, make_plan, order
from vtoken.base.hashing import mix64
from vtoken.base.sampling_params import SamplingParams
from vtoken.executor.sim import SimExecutor
from vtoken.memory.copy import Copy, CopyKind
from vtoken.policies.statistics import (
    AttentionStatistic,
    CacheStatistic,
    CountLow,
    FutureAttention,
    KeyNorm,
    KeySimilarity,
    LagDeviation,
    Sum,
    SumLast,
)
from vtoken.schedule.plan import StepPlan

WIDE = 2**31 - 1  # so many tokens that two sums do not give the same one by chance
MANY_BLOCKS = 64


def cells_of(sim: SimExecutor, lane: Lane) -> dict[int, int]:
    """Position -> the number in its cell."""
    rows = list(lane.past)
    return dict(zip(lane.past.values(), sim.cells[lane.slots(rows)].tolist(), strict=True))


def run(sim: SimExecutor, *slices: Slice, **plan: object) -> list[int]:
    result = sim.execute(make_plan(slices, **plan))
    for s in slices:
        s.commit()
    return result.tokens.tolist()


def compute(block_size: int, table: list[int], text: list[int], chunks: list[int]) -> tuple[list[int], dict[int, int]]:
    """(what is drawn after each chunk, the cells in the end) of a text computed in chunks."""
    sim, lane, drawn, start = SimExecutor(MANY_BLOCKS, block_size, vocab_size=WIDE), Lane(block_size, table), [], 0
    sim.poison(np.arange(MANY_BLOCKS, dtype=np.int32), 0)
    for chunk in chunks:
        drawn += run(sim, Slice(lane, text[start : start + chunk]))
        start += chunk
    return drawn, cells_of(sim, lane)


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[int, list[int]]:
    length = draw(st.integers(1, 60))
    cuts = sorted(draw(st.sets(st.integers(1, length))) | {0, length})
    return length, np.diff(cuts).tolist()


@given(chunking=chunkings(), block_size=st.sampled_from([4, 5, 32, 33, 64]), order=st.permutations(range(16)))
def test_chunks_and_places_change_nothing(chunking: tuple[int, list[int]], block_size: int, order: list[int]) -> None:
    length, chunks = chunking
    text = tokens(length, 1)
    one_by_one, cells = compute(block_size, list(range(16)), text, [1] * length)
    drawn, same_cells = compute(block_size, order, text, chunks)
    ends = np.cumsum(chunks) - 1
    assert drawn == [one_by_one[end] for end in ends]
    assert same_cells == cells


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_the_plain_model(temperature: float) -> None:
    prompt, params = tokens(21, 2), SamplingParams(max_tokens=12, temperature=temperature)
    sim, lane = SimExecutor(8, 8), Lane(8, [5, 0, 7, 2, 6])
    answer: list[int] = []
    fresh = prompt
    for index in range(12):
        sampling = draws([0], temperature=temperature, seeds=2**63 + 5, choices=3, indices=index)
        answer += run(sim, Slice(lane, fresh), sampling=sampling)
        fresh = answer[-1:]
    assert answer == expected_output(prompt, params, seed=2**63 + 5, choice=3).token_ids


def a_past(sim: SimExecutor, text: list[int]) -> Lane:
    lane = Lane(4, [3, 1, 4])
    run(sim, Slice(lane, text))
    return lane


def next_token(sim: SimExecutor, lane: Lane, token: int = 77, position: int | None = None) -> int:
    """What would be drawn after one more token; the lane is as before afterwards."""
    return int(sim.execute(make_plan([Slice(lane, [token], position, rows=[11])])).tokens[0])


def test_every_visible_cell_counts_and_no_other_does() -> None:
    sim = SimExecutor(8, 4, vocab_size=WIDE)
    lane = a_past(sim, tokens(9, 3))
    del lane.past[2], lane.past[5]
    undisturbed = next_token(sim, lane)
    visible = set(lane.slots(list(lane.past)).tolist())
    for slot in range(len(sim.cells)):
        kept = sim.cells[slot]
        sim.cells[slot] += np.uint64(1)
        changed = next_token(sim, lane) != undisturbed
        assert changed == (slot in visible), f"slot {slot}"
        sim.cells[slot] = kept


def test_every_token_and_position_counts() -> None:
    text = tokens(9, 4)
    undisturbed, _ = compute(4, [0, 1, 2], text, [9])
    for i in range(9):
        other = text.copy()
        other[i] += 1
        assert compute(4, [0, 1, 2], other, [9])[0] != undisturbed
    swapped = [text[1], text[0], *text[2:]]
    assert compute(4, [0, 1, 2], swapped, [9])[0] != undisturbed
    sim = SimExecutor(8, 4, vocab_size=WIDE)
    lane = a_past(sim, text)
    assert next_token(sim, lane, position=9) != next_token(sim, lane, position=10)
    assert next_token(sim, lane, token=1) != next_token(sim, lane, token=2)


def test_a_dead_token_changes_what_comes_after_it() -> None:
    sim = SimExecutor(8, 4, vocab_size=WIDE)
    lane = a_past(sim, tokens(9, 5))
    undisturbed = next_token(sim, lane)
    without = []
    for row in range(9):
        fewer = Lane(4, lane.block_table, {r: p for r, p in lane.past.items() if r != row})
        plan = make_plan([Slice(fewer, [77], 9, rows=[9])])
        without.append(int(sim.execute(plan).tokens[0]))
    assert len({undisturbed, *without}) == 10


def test_where_a_token_lies_in_its_lane_is_of_no_account() -> None:
    sim = SimExecutor(16, 4, vocab_size=WIDE)
    lane = a_past(sim, tokens(9, 6))
    undisturbed = next_token(sim, lane)
    scattered = Lane(4, [8, 9, 10, 11], {row * 5 % 16: p for row, p in lane.past.items()})
    sim.cells[scattered.slots(list(scattered.past))] = sim.cells[lane.slots(list(lane.past))]
    plan = make_plan([Slice(scattered, [77], 9, rows=[13])])
    assert sim.execute(plan).tokens.tolist() == [undisturbed]


def test_a_batch_is_its_slices_one_by_one() -> None:
    texts = [tokens(n, 7, n) for n in (1, 6, 3, 1)]

    def lanes() -> list[Lane]:
        return [Lane(4, [4 * i, 4 * i + 1, 4 * i + 2]) for i in range(4)]

    together, apart = SimExecutor(16, 4, vocab_size=WIDE), SimExecutor(16, 4, vocab_size=WIDE)
    first, second = lanes(), lanes()
    for fresh in (texts, [[5], [6, 7], [8], [9]]):
        drawn = run(together, *(Slice(lane, text) for lane, text in zip(first, fresh, strict=True)))
        assert drawn == [run(apart, Slice(lane, text))[0] for lane, text in zip(second, fresh, strict=True)]
    assert (together.cells == apart.cells).all()


def test_a_slice_may_read_what_another_one_of_the_plan_writes() -> None:
    text = tokens(8, 8)
    alone, _ = compute(4, [0, 1, 2], [*text, 9], [9])
    sim = SimExecutor(8, 4, vocab_size=WIDE)
    sim.poison(np.arange(8, dtype=np.int32), 0)
    writer, reader = Lane(4, [0, 1]), Lane(4, [0, 1, 2], {i: i for i in range(8)})
    assert run(sim, Slice(writer, text), Slice(reader, [9]))[1] == alone[0]


class TestDraws:
    def test_greedy_ignores_the_stream(self) -> None:
        sim, lane = SimExecutor(8, 4, vocab_size=WIDE), Lane(4, [0, 1])
        sampling = draws([0] * 4, temperature=0.0, seeds=[1, 2, 1, 1], choices=[0, 0, 1, 0], indices=[0, 0, 0, 1])
        assert len(set(run(sim, Slice(lane, [1, 2]), sampling=sampling))) == 1

    def test_seed_choice_and_index_each_make_another_stream(self) -> None:
        sim, lane = SimExecutor(8, 4, vocab_size=WIDE), Lane(4, [0, 1])
        seeds, choices, indices = [1, 2, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]
        sampling = draws([0] * 5, temperature=1.0, seeds=seeds, choices=choices, indices=indices)
        drawn = run(sim, Slice(lane, [1, 2]), sampling=sampling)
        assert len(set(drawn)) == 4
        assert drawn[0] == drawn[4]

    def test_tokens_are_of_the_vocabulary(self) -> None:
        sim, lane = SimExecutor(8, 4, vocab_size=3), Lane(4, [0, 1])
        drawn = run(sim, Slice(lane, [1, 2]), sampling=draws([0] * 50, temperature=1.0, indices=range(50)))
        assert set(drawn) == {0, 1, 2}


class TestCopies:
    def plan(self, *copies: Copy, step: int = 0) -> StepPlan:
        return make_plan([], block_size=4, copies=copies, step=step)

    def slots(self, *blocks: int) -> np.ndarray:
        return (4 * np.array(blocks)[:, None] + np.arange(4)).reshape(-1)

    def test_ordered_ones_run_in_order_and_before_the_forward_pass(self) -> None:
        sim = SimExecutor(4, 4, num_host_blocks=2, vocab_size=WIDE)
        sim.poison(np.arange(4, dtype=np.int32), 0)
        before = sim.cells.copy()
        sim.execute(
            self.plan(
                Copy(CopyKind.SWAP_OUT, self.slots(0), self.slots(1)),
                Copy(CopyKind.RELOCATE, self.slots(1), self.slots(0)),
                Copy(CopyKind.COPY_ON_WRITE, self.slots(0), self.slots(3)),
                Copy(CopyKind.SWAP_IN, self.slots(1), self.slots(1)),
            )
        )
        zero, one, two, _ = before.reshape(4, 4)
        assert (sim.cells.reshape(4, 4) == np.stack((one, zero, two, one))).all()
        assert (sim.host_cells.reshape(2, 4)[1] == zero).all()

        lane = Lane(4, [3, 1, 0], {0: 0, 1: 1})
        expected = next_token(sim, lane)
        sim.cells[self.slots(2)] = sim.cells[self.slots(3)]
        sim.cells[self.slots(3)] = 0
        copy = Copy(CopyKind.RELOCATE, self.slots(2), self.slots(3))
        assert sim.execute(make_plan([Slice(lane, [77], 2)], copies=[copy])).tokens.tolist() == [expected]

    def test_a_plan_may_have_nothing_but_copies(self) -> None:
        sim = SimExecutor(4, 4)
        sim.poison(np.arange(4, dtype=np.int32), 0)
        plan = make_plan([], block_size=4, copies=[Copy(CopyKind.RELOCATE, self.slots(2), self.slots(3))])
        result = sim.execute(plan)
        assert len(result.tokens) == 0
        assert (sim.cells[self.slots(2)] == sim.cells[self.slots(3)]).all()

    @pytest.mark.parametrize("delay", [0, 1, 3])
    def test_beside_ones_end_when_they_are_said_to(self, delay: int) -> None:
        sim = SimExecutor(4, 4, beside_delay=delay)
        sim.poison(np.arange(4, dtype=np.int32), 0)
        before = sim.cells.reshape(4, 4).copy()
        copies = (Copy(CopyKind.RELOCATE, self.slots(0), self.slots(2), ticket=7),)
        for step in range(5):
            ended = sim.execute(self.plan(*copies, step=step)).ended
            copies = ()
            assert ended == ((7,) if step == delay else ())
            moved = sim.cells.reshape(4, 4)[2] == before[0 if step >= delay else 2]
            assert moved.all()


def heavy(*keys: int) -> int:
    return 2**20 // (64 + (mix(*keys) & 0xFFF))


def plain_statistics(sim: SimExecutor, lane: Lane, statistic: AttentionStatistic, first: int) -> dict[int, float]:
    """What a text that has lost no token draws in all: one query and one cell after the other."""
    cells = cells_of(sim, lane)
    drawn = dict.fromkeys(sorted(cells), 0.0)
    for query in range(first, len(cells)):
        weights = {p: heavy(cells[p]) + heavy(cells[p], query // 64) for p in range(query + 1)}
        for p, weight in weights.items():
            if isinstance(statistic, CountLow):
                drawn[p] += weight * len(weights) < sum(weights.values())
            else:
                drawn[p] += weight * (2**36 // sum(weights.values())) * 2.0**-36
    return drawn


ATTENTION_STATISTICS = [Sum(), SumLast(9), CountLow(9)]
by_name = pytest.mark.parametrize("statistic", ATTENTION_STATISTICS, ids=lambda statistic: type(statistic).__name__)


class TestAttentionStatistics:
    @by_name
    @given(cuts=st.sets(st.integers(1, 149), max_size=12), first=st.integers(0, 150), places=st.permutations(range(40)))
    def test_are_those_of_the_plain_model_whatever_the_chunks_and_places(
        self, statistic: AttentionStatistic, cuts: set[int], first: int, places: list[int]
    ) -> None:
        sim, lane, text = SimExecutor(40, 4), Lane(4, places[:38]), tokens(150, 1)
        drawn = dict.fromkeys(range(150), 0.0)
        for begin, end in pairwise([0, *sorted(cuts), 150]):
            part = Slice(lane, text[begin:end])
            wanted = order(statistic, [0], first)
            (values,) = sim.execute(make_plan([part], statistics=[wanted])).statistics[statistic.name]
            part.commit()
            for row, position in lane.past.items():
                drawn[position] += values[row]
        assert drawn == plain_statistics(sim, lane, statistic, first)

    @by_name
    def test_a_batch_is_its_slices_one_by_one_and_nobody_else_is_in_it(self, statistic: AttentionStatistic) -> None:
        def lanes() -> list[Slice]:
            pasts = [{}, {0: 0, 3: 2}, {1: 3, 2: 0, 5: 1}, {}, {4: 1}]
            return [
                Slice(Lane(4, [4 * i, 4 * i + 1, 4 * i + 2], past), tokens(n, i), rows=range(6, 6 + n))
                for i, (past, n) in enumerate(zip(pasts, (1, 1, 2, 5, 1), strict=True))
            ]

        def fresh() -> SimExecutor:
            sim = SimExecutor(20, 4)
            sim.poison(np.arange(20, dtype=np.int32), 0)
            return sim

        some = [0, 1, 2, 4]
        plan = make_plan(lanes(), statistics=[order(statistic, some, [0, 0, 5, 1])])
        found = fresh().execute(plan).statistics[statistic.name]
        assert found.shape == (4, 12)
        assert found.dtype == np.float64
        for line, (s, first) in enumerate(zip(some, [0, 0, 5, 1], strict=True)):
            part = lanes()[s]
            alone = fresh().execute(make_plan([part], statistics=[order(statistic, [0], first)])).statistics
            assert np.array_equal(found[line], alone[statistic.name][0])
            part.commit()
            assert set(np.flatnonzero(found[line])) <= set(part.lane.past)
        assert found[0].any() == (statistic != CountLow(9)), "a lone token draws everything"

    def test_shares_of_a_query_add_up_to_one_and_few_tokens_have_most_of_it(self) -> None:
        sim, lane = SimExecutor(128, 4), Lane(4, list(range(101)))
        run(sim, Slice(lane, tokens(400, 2)))
        (shares,) = sim.execute(make_plan([Slice(lane, [7])], statistics=[Sum()])).statistics["Sum()"]
        assert shares.sum() == pytest.approx(1, abs=1e-4)
        assert np.sort(shares)[-40:].sum() > 0.3

    def test_what_is_not_asked_for_is_not_returned(self) -> None:
        plan = make_plan([Slice(Lane(4, [0, 1]), tokens(5, 1))])
        assert SimExecutor(4, 4).execute(plan).statistics == {}


class TestCacheStatistics:
    def values(self, sim: SimExecutor, lane: Lane, statistic: CacheStatistic, **wish: object) -> dict[int, float]:
        """By position, with one more token at position 9; nothing else has a value."""
        part = Slice(lane, [77], 9, rows=[14])
        (values,) = sim.execute(make_plan([part], statistics=[order(statistic, [0], **wish)])).statistics.values()
        assert values.shape == (1, 16)
        positions = {**lane.past, 14: 9}
        found = {positions[row]: float(values[0, row]) for row in np.flatnonzero(~np.isnan(values[0])).tolist()}
        assert all(0 <= value < 1 for value in found.values())
        return found

    def lane(self) -> tuple[SimExecutor, Lane]:
        sim = SimExecutor(16, 4, vocab_size=WIDE)
        lane = a_past(sim, tokens(9, 6))
        lane.block_table.append(5)
        return sim, lane

    def test_follow_their_tokens_and_do_not_depend_on_the_others(self) -> None:
        sim, lane = self.lane()
        found = self.values(sim, lane, KeySimilarity())
        assert len(set(found.values())) == 10
        scattered = Lane(4, [8, 9, 10, 11], {row * 3 % 16: p for row, p in lane.past.items() if p != 4})
        sim.cells[scattered.slots(list(scattered.past))] = sim.cells[lane.slots([p for p in range(9) if p != 4])]
        moved = self.values(sim, scattered, KeySimilarity())
        # The new token's own cell depends on what it can read, as its key would.
        assert {p: v for p, v in moved.items() if p < 9} == {p: v for p, v in found.items() if p not in (4, 9)}

    def test_each_statistic_has_numbers_of_its_own(self) -> None:
        sim, lane = self.lane()
        found = [
            self.values(sim, lane, each)
            for each in (KeySimilarity(), KeyNorm(), LagDeviation(4, 1), LagDeviation(5, 1))
        ]
        assert len({each[3] for each in found}) == 4

    def test_known_ones_are_left_out(self) -> None:
        sim, lane = self.lane()
        assert list(self.values(sim, lane, KeyNorm(), first=7)) == [7, 8, 9]
        assert len(self.values(sim, lane, KeySimilarity(), first=7)) == 10
        lane.past = {row: 8 - row for row in lane.past}  # rows in another order
        assert sorted(self.values(sim, lane, KeyNorm(), first=7)) == [7, 8, 9]

    def test_those_that_are_not_due_have_none(self) -> None:
        sim, lane = self.lane()
        assert len(self.values(sim, lane, FutureAttention(), due=[True])) == 10
        assert not self.values(sim, lane, FutureAttention(), due=[False])


def test_poison_changes_the_named_blocks_only_and_each_step_anew() -> None:
    sim = SimExecutor(4, 4)
    sim.poison(np.array([1, 3], np.int32), 1)
    first = sim.cells.reshape(4, 4).copy()
    assert first[[1, 3]].all()
    assert not first[[0, 2]].any()
    sim.poison(np.array([3], np.int32), 2)
    assert (sim.cells.reshape(4, 4)[1] == first[1]).all()
    assert (sim.cells.reshape(4, 4)[3] != first[3]).all()


def test_a_plan_is_not_changed_by_its_execution() -> None:
    lane = Lane(4, [0, 1, 2], {0: 0, 2: 2})
    plan = make_plan([Slice(lane, tokens(6, 1), 3)])
    arrays = {name: value for name, value in vars(plan).items() if isinstance(value, np.ndarray)}
    before = replace(plan, **{name: value.copy() for name, value in arrays.items()})
    SimExecutor(4, 4).execute(plan)
    for name in arrays:
        assert (getattr(plan, name) == getattr(before, name)).all(), name


def test_the_hash_of_the_plain_model_is_the_executors() -> None:
    for keys in ((0,), (1, 2, 3), (2**63 + 5, 7, 0), (5, -1)):
        assert mix(*keys) == int(mix64(*keys))
