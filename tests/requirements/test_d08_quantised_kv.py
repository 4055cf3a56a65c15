"""D8: fp8 and int8 KV take about half the bytes of float16, scales included; the error is measured.

Quality on an evaluation set: `benchmarks/bench_kv_quality.py`, figures in docs/results.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.attention.layer import Text, run
from tests.engine.recorded import Recording, record, scattered
from tests.requirements.test_x08_same_output import SETTINGS, _demands
from tests.tiny_models import save_llama
from vtoken.attention.cpu import CpuAttention
from vtoken.base.config import EngineConfig
from vtoken.base.kv_format import KV_FORMATS
from vtoken.planner.kv_memory import KVShape, plan_kv

SCALED = ["int8", "fp8_e4m3"]
BACKENDS = {"reference": None, "cpu": CpuAttention}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("d08"), num_layers=3, hidden_size=96, num_heads=6, num_kv_heads=2)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_bytes_are_about_half(name: str, head_dim: int) -> None:
    half, scaled = (KVShape(30, 3, head_dim, dtype) for dtype in ("float16", name))
    assert 0.5 < scaled.bytes_per_token / half.bytes_per_token <= 0.55


def test_the_pool_holds_as_many_tokens_more() -> None:
    """Of a given kv_memory, scales counted."""
    tokens = {}
    for name in KV_FORMATS:
        config = EngineConfig(model="any", kv_memory="64MiB", max_model_len="auto")
        plan = plan_kv(config, KVShape(30, 3, 64, name), model_max_len=8192, available=2**32)
        tokens[name] = plan.num_blocks * config.block_size
        assert plan.num_blocks * KVShape(30, 3, 64, name).bytes_per_block(config.block_size) <= 64 * 2**20
    for name in SCALED:
        assert tokens[name] / tokens["float16"] == pytest.approx(128 / 68, rel=0.01)
        assert tokens[name] / tokens["float32"] == pytest.approx(256 / 68, rel=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "largest"), [("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2), ("fp8_e4m3", 6e-2)]
)
def test_error_of_attention(name: str, largest: float, backend: str) -> None:
    """Relative to the output's size, over decode and chunks; each format comes near its bound."""
    text = Text.random(300, num_heads=6, num_kv_heads=2, head_dim=64, spread=0.3)
    made = BACKENDS[backend]
    outputs = [
        run(text, cuts=range(60, 300, 7), kv=(form, form), backend=made and made())[0] for form in ("float32", name)
    ]
    error = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    assert largest / 20 < error < largest


@pytest.mark.parametrize("name", SCALED)
def test_an_outlier_of_a_thousand_spoils_its_own_head_only(name: str) -> None:
    text = Text.random(100, num_heads=4, num_kv_heads=2, head_dim=32, spread=0.3)
    clean, _ = run(text, kv=(name, name))
    text.v[50, 0, 3] *= 1000
    spoiled, _ = run(text, kv=(name, name))
    assert torch.equal(spoiled[:, 2:], clean[:, 2:]), "the other KV head's queries"
    assert torch.equal(spoiled[:50], clean[:50]), "the queries before it"
    assert not torch.equal(spoiled[50:, :2], clean[50:, :2])


EVICT = scattered(every=6)
# Formats differ in what a cell holds, not in where cells go: two of them through every memory, scales and none.
MEMORIES = [
    pytest.param(
        name,
        memory,
        marks=() if memory == "swap" or name in ("int8", "bfloat16") else pytest.mark.slow,
    )
    for name in KV_FORMATS
    for memory in ("neighbours", "prefix cache and chunks", "recompute", "swap", "blocks of 5")
]


def common(name: str) -> dict[str, str | None]:
    return {"kv_cache_dtype": name, "value_cache_dtype": "int8" if name == "float16" else None}


@pytest.fixture(scope="module")
def lone(folder: Path) -> Callable[[str], list[Recording]]:
    """Each request by itself, with a format's name."""
    return cache(lambda name: [record(folder, [demand], EVICT, num_blocks=64, **common(name)) for demand in _demands()])


@pytest.mark.parametrize(("name", "memory"), MEMORIES)
def test_prefix_cache_swap_forks_and_evictions_work_on_every_format(
    folder: Path, lone: Callable[[str], list[Recording]], name: str, memory: str
) -> None:
    """A request alone and in company, to the bit: choices that fork, tokens that die and rows that move included."""
    settings = {"max_model_len": 200, "max_num_seqs": 16} | SETTINGS[memory] | common(name)
    together = record(folder, _demands(), EVICT, **settings)
    assert together.tokens == [run.tokens[0] for run in lone(name)]
    assert together.bits == {key: bits for run in lone(name) for key, bits in run.bits.items()}


@pytest.mark.parametrize("name", SCALED)
def test_the_compiled_engine_agrees_with_the_reference(folder, name: str) -> None:
    """Most answers are the same; where rounding moves a code by one, a close second may win."""
    reference, compiled = (
        record(folder, _demands(), num_blocks=200, kv_cache_dtype=name, attention_backend=backend)
        for backend in ("reference", "cpu")
    )
    pairs = [
        (one, other)
        for expected, found in zip(reference.tokens, compiled.tokens, strict=True)
        for one, other in zip(expected, found, strict=True)
    ]
    assert len(pairs) > 8
    assert np.mean([one == other for one, other in pairs]) > 0.7
