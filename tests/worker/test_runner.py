"""`ModelRunner` and `LocalExecutor`: a plan goes in, facts come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.plans import Lane, Slice, draws, make_plan, order
from tests.tiny_models import save_mistral
from tests.worker.fake_model import FakeModel
from vtoken.base.errors import ConfigError
from vtoken.base.kv_format import KV_FORMATS
from vtoken.executor.base import Executor
from vtoken.executor.local import LocalExecutor
from vtoken.memory.copy import Copy, CopyKind
from vtoken.models.loader import load_model
from vtoken.planner.kv_memory import KVShape
from vtoken.policies.statistics import CountLow, FutureAttention, KeyNorm, Statistic, Sum
from vtoken.schedule.plan import StepPlan, StepResult

BLOCK_SIZE = 4


def kv_shape(model: FakeModel, dtype: str = "float32") -> KVShape:
    return KVShape(model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim, dtype)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def executor(model: FakeModel) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(
        model,
        num_blocks=40,
        block_size=BLOCK_SIZE,
        num_host_blocks=10,
        attention_backend="reference",
        kv_shape=kv_shape(FakeModel()),
    )
    for store in (executor.store, executor.host_store):
        for cache in store.tensors:
            cache.fill_(torch.nan)
    yield executor
    executor.close()


def greedy_alone(executor: LocalExecutor, prompt: list[int], num_tokens: int, first_block: int) -> list[int]:
    """Prompt in one go, then token by token, alone."""
    lane = Lane(BLOCK_SIZE, list(range(first_block, first_block + 10)))
    tokens, todo = [], prompt
    for _ in range(num_tokens):
        part = Slice(lane, todo)
        todo = executor.execute(make_plan([part])).tokens.tolist()
        part.commit()
        tokens += todo
    return tokens


def test_a_local_executor_is_an_executor(executor: LocalExecutor) -> None:
    face: Executor = executor
    plan = make_plan([Slice(Lane(BLOCK_SIZE, [3]), [1, 2, 3])], step=41)
    result = face.execute(plan)
    assert isinstance(result, StepResult)
    assert result.step == 41
    assert result.tokens.dtype == np.int32
    assert (result.errors, result.statistics, result.ended) == ({}, {}, ())


def test_prompts_and_decodes_share_a_step(executor: LocalExecutor, model: FakeModel) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [30] * 9]
    expected = [greedy_alone(executor, prompt, 4, 0) for prompt in prompts]
    lanes = [Lane(BLOCK_SIZE, [20, 11, 35]), Lane(BLOCK_SIZE, [12, 21]), Lane(BLOCK_SIZE, [30, 13, 29, 14])]
    tokens: list[list[int]] = [[], [], []]
    # The prompts come one step after the other, so that every step but the first mixes both kinds; the last in chunks.
    for step in range(7):
        parts, drawing = [], []
        for i, (lane, prompt) in enumerate(zip(lanes, prompts, strict=True)):
            known = prompt + tokens[i]
            todo = known[lane.next_position :][: 5 if i == 2 else None]
            if step >= i and len(tokens[i]) < 4:
                parts.append(Slice(lane, todo))
                if lane.next_position + len(todo) == len(known):
                    drawing.append((len(parts) - 1, i))
        if not parts:
            break
        plan = make_plan(parts, sampling=draws([s for s, _ in drawing]))
        for (_, i), token in zip(drawing, executor.execute(plan).tokens.tolist(), strict=True):
            tokens[i].append(token)
        for part in parts:
            part.commit()
    assert tokens == expected
    assert any(len(set(positions)) > 1 and len(ids) > 2 for ids, positions in model.seen)


def test_logits_of_a_slice_are_computed_once(executor: LocalExecutor, model: FakeModel) -> None:
    parts = [Slice(Lane(BLOCK_SIZE, [i]), [i, i + 1, i + 2]) for i in range(3)]
    sampling = draws([2, 0, 2, 2, 0], temperature=[0, 0, 5, 5, 0], choices=[0, 0, 0, 1, 0])
    tokens = executor.execute(make_plan(parts, sampling=sampling)).tokens
    assert model.logit_rows == [2]
    alone = [executor.execute(make_plan([part])).tokens[0] for part in parts]
    assert tokens[[0, 1, 4]].tolist() == [alone[2], alone[0], alone[0]]


def test_a_chunk_in_the_middle_of_a_prompt_draws_nothing(executor: LocalExecutor, model: FakeModel) -> None:
    result = executor.execute(make_plan([Slice(Lane(BLOCK_SIZE, [1]), [1, 2])], sampling=draws([])))
    assert len(result.tokens) == 0
    assert sum(model.logit_rows) == 0


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_a_chunk_sees_itself_as_the_cache_holds_it(model: FakeModel, kv_dtype: str) -> None:
    """Rounded to the format of the cache, or the cut of chunks would change what later layers compute."""
    stores = []
    for cuts in ([0, 11], [0, 4, 5, 10, 11]):
        executor = LocalExecutor(model, num_blocks=3, block_size=BLOCK_SIZE, kv_shape=kv_shape(model, kv_dtype))
        lane = Lane(BLOCK_SIZE, [2, 0, 1])
        for begin, end in pairwise(cuts):
            part = Slice(lane, list(range(begin, end)))
            executor.execute(make_plan([part]))
            part.commit()
        stores.append(executor.store)
    slots = torch.from_numpy(lane.slots(range(11)))
    for layer in range(model.spec.num_layers):
        for once, chunked in zip(*(store.layers[layer].tensors for store in stores), strict=True):
            assert torch.equal(*(tensor.transpose(1, 2).flatten(0, 1)[slots] for tensor in (once, chunked)))


def test_copies_come_before_the_forward_pass(executor: LocalExecutor) -> None:
    lane = Lane(BLOCK_SIZE, [7, 3])
    first = Slice(lane, [1, 2, 3, 4, 5, 6])
    executor.execute(make_plan([first]))
    first.commit()
    expected = executor.execute(make_plan([Slice(lane, [9])])).tokens

    # Block 7 is copied to 8 and overwritten by another sequence in the same plan.
    moved = Lane(BLOCK_SIZE, [8, 3], past=lane.past)
    copy = Copy(CopyKind.COPY_ON_WRITE, np.arange(28, 32), np.arange(32, 36))
    plan = make_plan([Slice(Lane(BLOCK_SIZE, [7]), [31, 30, 29]), Slice(moved, [9])], copies=[copy])
    assert executor.execute(plan).tokens[1] == expected[0]


def test_a_plan_of_copies_alone(executor: LocalExecutor, model: FakeModel) -> None:
    lane = Lane(BLOCK_SIZE, [7, 3])
    first = Slice(lane, [1, 2, 3, 4, 5, 6])
    executor.execute(make_plan([first]))
    first.commit()
    expected = executor.execute(make_plan([Slice(lane, [9])])).tokens
    num_passes = len(model.seen)

    def only(kind: CopyKind, src: list[int], dst: list[int]) -> StepPlan:
        slots = [np.concatenate([np.arange(b * BLOCK_SIZE, (b + 1) * BLOCK_SIZE) for b in ids]) for ids in (src, dst)]
        return make_plan([], block_size=BLOCK_SIZE, copies=[Copy(kind, *slots)])

    executor.execute(only(CopyKind.SWAP_OUT, [7, 3], [2, 9]))
    for cache in executor.store.tensors:
        cache.fill_(torch.nan)
    result = executor.execute(only(CopyKind.SWAP_IN, [9, 2], [15, 16]))
    assert len(result.tokens) == 0
    assert len(model.seen) == num_passes
    swapped = Lane(BLOCK_SIZE, [16, 15], past=lane.past)
    assert executor.execute(make_plan([Slice(swapped, [9])])).tokens == expected


def test_tickets_come_back(executor: LocalExecutor) -> None:
    copy = Copy(CopyKind.RELOCATE, np.array([1]), np.array([9]), ticket=5)
    ended = executor.execute(make_plan([], block_size=BLOCK_SIZE, copies=[copy])).ended
    executor.copies._thread.shutdown(wait=True)  # type: ignore[union-attr]
    ended += executor.execute(make_plan([], block_size=BLOCK_SIZE)).ended
    assert ended == (5,)


def test_a_copy_that_failed_is_told(executor: LocalExecutor) -> None:
    copy = Copy(CopyKind.RELOCATE, np.array([1]), np.array([10_000]), ticket=5)
    failed = executor.execute(make_plan([], block_size=BLOCK_SIZE, copies=[copy])).failed
    executor.copies._thread.shutdown(wait=True)  # type: ignore[union-attr]
    failed += executor.execute(make_plan([], block_size=BLOCK_SIZE)).failed
    assert failed == (5,)


def test_nan_in_one_request_leaves_the_others_alone(executor: LocalExecutor, model: FakeModel) -> None:  # U77
    parts = [Slice(Lane(BLOCK_SIZE, [i]), [i + 1, 5, 6]) for i in range(3)]
    expected = executor.execute(make_plan(parts)).tokens
    model.embedding[2] = torch.inf  # token 2 stands in the second prompt only
    result = executor.execute(make_plan(parts))
    assert list(result.errors) == [1]
    assert result.tokens.tolist() == [expected[0], -1, expected[2]]


def test_statistics_are_sums_over_layers_by_row(executor: LocalExecutor, model: FakeModel) -> None:
    # Rows 2 and 5 of the second lane are dead; its new tokens take them.
    lane = Lane(BLOCK_SIZE, [20, 21])
    first = Slice(lane, [3, 1, 4, 1, 5, 9])
    executor.execute(make_plan([first]))
    first.commit()
    del lane.past[2], lane.past[4]
    parts = [Slice(Lane(BLOCK_SIZE, [i, i + 1]), [7] * 7) for i in (0, 2)]
    parts.append(Slice(lane, [2, 6], first_position=6, rows=[2, 6]))
    drawn = executor.execute(make_plan(parts, statistics=[Sum()])).statistics[Sum().name]
    assert drawn.shape == (3, 8)
    heads_and_layers = model.spec.num_heads * model.spec.num_layers
    np.testing.assert_allclose(drawn.sum(axis=1), np.array([7, 7, 2]) * heads_and_layers, atol=1e-5)
    assert (drawn[2] > 0).tolist() == [True, True, True, True, False, True, True, False]
    assert np.array_equal(drawn[0], drawn[1])


def test_statistics_of_some_slices_only(executor: LocalExecutor) -> None:
    lanes = [Lane(BLOCK_SIZE, [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(3)]
    parts = [Slice(lane, [4, 9, 1, 6, i, i, 2]) for i, lane in enumerate(lanes)]
    everything = executor.execute(make_plan(parts, statistics=[Sum(), CountLow(3), KeyNorm()])).statistics
    orders = [order(Sum(), [2]), order(CountLow(3), [0, 2]), order(KeyNorm(), [1], first=5)]
    some = executor.execute(make_plan(parts, statistics=orders)).statistics
    assert np.array_equal(some["Sum()"], everything["Sum()"][[2]])
    assert np.array_equal(some["CountLow(window=3)"], everything["CountLow(window=3)"][[0, 2]])
    expected = everything["KeyNorm()"][[1]]
    expected[:, :5] = np.nan
    assert np.array_equal(some["KeyNorm()"], expected, equal_nan=True)


def test_what_is_read_from_the_cache_is_what_the_step_left_in_it(executor: LocalExecutor, model: FakeModel) -> None:
    lane = Lane(BLOCK_SIZE, [20, 21])
    first = Slice(lane, [3, 1, 4, 1, 5, 9])
    executor.execute(make_plan([first]))
    first.commit()
    del lane.past[2], lane.past[4]
    part = Slice(lane, [2, 6], first_position=6, rows=[2, 6])
    found = executor.execute(make_plan([part], statistics=[KeyNorm()])).statistics["KeyNorm()"]
    part.commit()
    slots = torch.from_numpy(lane.slots(range(8)))
    keys = torch.stack([layer.keys.read(slots // BLOCK_SIZE, slots % BLOCK_SIZE) for layer in executor.store.layers])
    norms = keys.double().norm(dim=-1).mean(dim=(0, 2))
    assert np.isnan(found[0]).tolist() == [row not in lane.past for row in range(8)]
    np.testing.assert_allclose(found[0, list(lane.past)], norms[list(lane.past)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mistral(tmp_path_factory.mktemp("model"), sliding_window=16, max_position_embeddings=64)


class TestFutureAttention:
    """Through the whole worker, on a model that turns its queries."""

    WANTED = FutureAttention(horizon=30, window=10)

    def run(
        self, folder: Path, cuts: Sequence[int], *, backend: str = "reference", neighbour: bool = False
    ) -> np.ndarray:
        """By position, after 41 tokens of which some have died, computed in chunks that end at `cuts`."""
        model = load_model(folder)
        shape = KVShape(model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim, "float32")
        executor = LocalExecutor(model, num_blocks=40, block_size=4, attention_backend=backend, kv_shape=shape)
        blocks = np.random.default_rng(len(cuts)).permutation(np.arange(4, 40))[:11].tolist()
        lane, other = Lane(4, blocks), Lane(4, [1, 2, 3])
        text = [7 * i % 250 for i in range(41)]
        for begin, end in pairwise([0, *cuts, 41]):
            parts = [Slice(lane, text[begin:end])]
            if neighbour and other.next_position < 8:
                parts.insert(0, Slice(other, [5, 6]))
            mine = len(parts) - 1
            wanted = order(self.WANTED, range(len(parts)), owners=[9 if i == mine else 5 for i in range(len(parts))])
            plan = replace(make_plan(parts, statistics=[wanted]), lanes=np.arange(len(parts), dtype=np.int32)[::-1])
            result = executor.execute(plan)
            for part in parts:
                part.commit()
            if end == 20:
                for position in (2, 3, 11):
                    del lane.past[position]
        return result.statistics[self.WANTED.name][mine, :41]

    def test_chunks_and_neighbours_change_nothing(self, folder: Path) -> None:
        expected = self.run(folder, [20])
        assert np.isnan(expected[[2, 3, 11]]).all()
        assert np.isfinite(np.delete(expected, [2, 3, 11])).all()
        for cuts in ([7, 20, 33, 40], [20, *range(30, 41)], range(1, 41)):
            assert np.array_equal(self.run(folder, cuts), expected, equal_nan=True)
        assert np.array_equal(self.run(folder, [20, 35], neighbour=True)[:41], expected, equal_nan=True)

    def test_the_compiled_backend_gives_the_same(self, folder: Path) -> None:
        expected = self.run(folder, [20])
        np.testing.assert_allclose(self.run(folder, [20, 38, 39, 40], backend="cpu"), expected, rtol=1e-3, atol=1e-6)

    def test_beyond_the_last_position_of_the_model_nothing_turns(self, folder: Path) -> None:
        model = load_model(folder)
        shape = KVShape(model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim, "float32")
        executor = LocalExecutor(model, num_blocks=20, block_size=4, kv_shape=shape)
        plan = make_plan([Slice(Lane(4, list(range(16))), [5] * 64)], statistics=[self.WANTED])
        assert np.isfinite(executor.execute(plan).statistics[self.WANTED.name]).all()


def test_a_statistic_the_backend_cannot_give_is_our_bug(executor: LocalExecutor) -> None:
    plan = make_plan([Slice(Lane(BLOCK_SIZE, [1]), [1])], statistics=[Statistic()])
    with pytest.raises(AssertionError, match="cannot give"):
        executor.execute(plan)


def test_unknown_backend(model: FakeModel) -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'"):
        LocalExecutor(model, num_blocks=1, block_size=4, attention_backend="flash", kv_shape=kv_shape(FakeModel()))


def test_no_memory_for_the_pool(model: FakeModel) -> None:
    with pytest.raises(ConfigError, match="ask for fewer blocks"):
        LocalExecutor(model, num_blocks=2**44, block_size=16, kv_shape=kv_shape(FakeModel()))


def test_measured_costs_leave_the_stores_alone(executor: LocalExecutor) -> None:
    costs = executor.measure_costs()
    assert costs.copy_bytes_per_s > 0
    assert costs.flops_per_s > 0
    assert all(cache.isnan().all() for cache in (*executor.store.tensors, *executor.host_store.tensors))
    assert not any(executor.copies.num_copies.values())
