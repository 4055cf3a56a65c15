"""Replayed steps are the steps they replace, to the bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.recorded import Demand, record, scattered
from tests.plans import Lane, Slice, make_plan
from tests.tiny_models import (
    save_gemma2,
    save_gemma3,
    save_gpt2,
    save_llama,
    save_mistral,
    save_opt,
    save_qwen3,
)
from vtoken.attention.rotation import Rotation
from vtoken.executor.local import LocalExecutor
from vtoken.kernels import fused
from vtoken.kernels.tape import Tape
from vtoken.models.base import Attend, CausalLM
from vtoken.models.kernels import COMPILED
from vtoken.models.loader import load_model
from vtoken.models.prepare import prepare_linears
from vtoken.planner.kv_memory import KVShape
from vtoken.policies.statistics import CountLow, FutureAttention, KeyNorm, KeySimilarity, Statistic, Sum, SumLast
from vtoken.worker import replay

BLOCK_SIZE = 4


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": save_llama,
    "window": lambda folder: save_mistral(folder, sliding_window=9),
    "norms of heads": save_qwen3,
    "gpt2": save_gpt2,
    "opt": save_opt,
    "opt, norms last": lambda folder: save_opt(folder, do_layer_norm_before=False, word_embed_proj_dim=24),
    "gemma2": save_gemma2,
    "gemma3": save_gemma3,
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


def demands() -> list[Demand]:
    """Sequences that end at different times, so that steps of 5, 4, ... 1 tokens come up."""
    return [Demand([7 + i, 3, 5, 9 * i], i, {"max_tokens": 6 + 5 * i, "temperature": 0.0}) for i in range(5)]


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}], ids=str)
def test_a_whole_run_has_the_same_bits(folder: Path, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    replays = 0
    run = replay._Recorded.run

    def counting(*args: object) -> Tensor:
        nonlocal replays
        replays += 1
        return run(*args)

    monkeypatch.setattr(replay._Recorded, "run", counting)
    common = {"attention_backend": "cpu", "num_blocks": 40, "block_size": BLOCK_SIZE, "max_model_len": 60}
    # A policy that lets tokens die moves rows about, so that the window needs their positions.
    replayed = record(folder, demands(), scattered(every=5), **common, **settings)
    assert replays > 10
    monkeypatch.setattr(replay, "MOST_TOKENS", 0)
    before = replays
    plain = record(folder, demands(), scattered(every=5), **common, **settings)
    assert replays == before
    assert replayed.bits == plain.bits
    assert replayed.tokens == plain.tokens


class Steps:
    """One sequence, token by token, with its statistics."""

    def __init__(self, folder: Path, model: CausalLM | None = None) -> None:
        if model is None:
            model = load_model(folder, kernels=COMPILED)
            prepare_linears(model, backend="vtoken_f32")
        shape = KVShape(model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim, "float32")
        self.executor = LocalExecutor(
            model, num_blocks=20, block_size=BLOCK_SIZE, attention_backend="cpu", kv_shape=shape
        )
        self.lane = Lane(BLOCK_SIZE, [13, 2, 19, 0, 7, 4, 11, 3, 16, 5])

    def run(
        self, num_steps: int, statistics_from: int = 0, wanted: Sequence[Statistic] = (Sum(),)
    ) -> Iterator[tuple[int, np.ndarray | None, int]]:
        """(token drawn, all statistics side by side, slots read so far) of each step."""
        token = 3
        for i in range(num_steps):
            part = Slice(self.lane, [token])
            plan = make_plan([part], statistics=wanted if i >= statistics_from else [])
            result = self.executor.execute(plan)
            part.commit()
            token = int(result.tokens[0])
            found = [result.statistics[order.statistic.name] for order in plan.statistics]
            yield token, np.concatenate(found) if found else None, self.executor.backend.slots_read


@pytest.mark.parametrize(
    "wanted",
    [
        [Sum()],
        [Sum(), CountLow(4), SumLast(5), SumLast(6), KeyNorm()],
        [FutureAttention(horizon=9, window=4), KeySimilarity()],
    ],
    ids=["sum", "several", "queries"],
)
def test_statistics_and_slots_read_are_those_of_a_plain_run(
    folder: Path, wanted: Sequence[Statistic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proven in the second step, which asks for none; statistics come from the fourth on."""
    replayed = list(Steps(folder).run(12, 3, wanted))
    monkeypatch.setattr(replay, "MOST_TOKENS", 0)
    plain = list(Steps(folder).run(12, 3, wanted))
    for (token, drawn, slots), (plain_token, plain_drawn, plain_slots) in zip(replayed, plain, strict=True):
        assert token == plain_token
        assert (drawn is None) == (plain_drawn is None)
        assert drawn is None or np.array_equal(drawn, plain_drawn, equal_nan=True)
        # The proving step attends twice.
        assert slots >= plain_slots
    increments = np.diff([slots for _, _, slots in replayed])[2:]
    assert np.array_equal(increments, np.diff([slots for _, _, slots in plain])[2:])


def test_steps_that_remember_queries_are_not_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(folder)
    list(steps.run(3, statistics_from=99))
    monkeypatch.setattr(replay._Recorded, "run", None)
    list(steps.run(2, wanted=[FutureAttention(window=4)]))
    with pytest.raises(TypeError):
        list(steps.run(1))


def test_steps_with_statistics_are_not_run_twice(folder: Path) -> None:
    """Each query gives every head and layer the mass of one."""
    steps = Steps(folder)
    spec = steps.executor._model.spec
    for _, drawn, _ in steps.run(6):
        assert drawn is not None
        assert drawn.sum() == pytest.approx(spec.num_layers * spec.num_heads, abs=1e-5)


def test_a_model_that_computes_outside_of_the_kernels_is_found_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(folder, kernels=COMPILED)
    prepare_linears(model, backend="vtoken_f32")
    decode = type(model).decode

    def scaled(self: CausalLM, x: Tensor, attend: Attend) -> Tensor:
        # A product of torch, on no tape, that all keys and values depend on: a wrong replay must leave none of its own.
        return decode(self, x * torch.linspace(1, 2, x.shape[1]), attend)

    monkeypatch.setattr(type(model), "decode", scaled)
    with caplog.at_level(logging.WARNING, "vtoken"):
        found = [token for token, _, _ in Steps(folder, model).run(8, statistics_from=99)]
    assert [record.message for record in caplog.records] == [
        "steps cannot be replayed: the model computes something outside of the compiled kernels"
    ]
    monkeypatch.setattr(replay, "MOST_TOKENS", 0)
    assert found == [token for token, _, _ in Steps(folder, model).run(8, statistics_from=99)]


def test_each_layer_turns_by_its_own_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rotations, one layer each; then one layer of which no rotation is asked."""

    def both(self: CausalLM, positions: Tensor, lengths: Tensor | None = None) -> tuple[Rotation, ...]:
        return (*rotations(self, positions), *rotations(self, 5 * positions))

    folder = save_llama(tmp_path)
    model = load_model(folder, kernels=COMPILED)
    prepare_linears(model, backend="vtoken_f32")
    rotations = type(model).rotations
    monkeypatch.setattr(type(model), "rotations", both)

    def answer(*which: int | None) -> list[int]:
        layers = [replace(spec, rotation=each) for spec, each in zip(model.spec.layers, which, strict=True)]
        model.spec = replace(model.spec, layers=tuple(layers))
        return [token for token, _, _ in Steps(folder, model).run(30, statistics_from=99)]

    choices = [(0, 1), (1, 0), (0, None), (1, 1)]
    replayed = [answer(*which) for which in choices]
    assert len({tuple(tokens) for tokens in replayed}) == len(choices)
    monkeypatch.setattr(replay, "MOST_TOKENS", 0)
    assert replayed == [answer(*which) for which in choices]


@pytest.mark.parametrize("backend", ["torch", "onednn"])
def test_linears_that_cannot_be_recorded_are_left_alone(folder: Path, backend: str) -> None:
    model = load_model(folder, kernels=COMPILED)
    prepare_linears(model, backend=backend)
    steps = Steps(folder, model)
    list(steps.run(4, statistics_from=99))
    assert not steps.executor._runner._replays._recorded


def test_a_failed_recording_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(folder)
    model = steps.executor._model
    decode = type(model).decode

    def failing(*args: object) -> Tensor:
        decode(*args)
        raise MemoryError("no more")

    monkeypatch.setattr(type(model), "decode", failing)
    with pytest.raises(MemoryError, match="no more"):
        list(steps.run(1, statistics_from=99))
    monkeypatch.setattr(type(model), "decode", decode)
    assert len(list(steps.run(5, statistics_from=99))) == 5
    with torch.inference_mode():
        assert all(found.is_proven for found in steps.executor._runner._replays._recorded.values())


def test_another_thread_s_calls_are_not_recorded() -> None:
    """Two engines may run in two threads, and each has its own tapes."""
    weight = torch.ones(8)
    tape = Tape()
    with tape.recording(), ThreadPoolExecutor(1) as other:
        other.submit(fused.add_rms_norm, torch.ones(1, 8), None, weight, 1e-6).result()
        assert not tape.args
        fused.add_rms_norm(torch.ones(1, 8), None, weight, 1e-6)
    assert len(tape.args) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run_without_replays(folder: Path, dtype: str) -> None:
    """Computed by torch between the kernels, so nothing can be recorded; the answer is near float32's."""
    common = {"attention_backend": "cpu", "num_blocks": 40, "block_size": BLOCK_SIZE, "max_model_len": 60}
    narrow, exact = (record(folder, demands()[:1], dtype=name, **common) for name in (dtype, "float32"))
    first = (demands()[0].seed, 0, 0)
    found, expected = (np.frombuffer(run.bits[first], np.float32) for run in (narrow, exact))
    np.testing.assert_allclose(found, expected, atol=0.1 * np.abs(expected).max())
