"""X3: eviction together with prefix cache, several choices, chunked prefill, preemption and quantised KV.

A sequence's eviction never changes another's view: each answer is the same, to the bit, as if its request were alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.recorded import Demand, record
from tests.tiny_models import VOCAB_SIZE, save_planted_llama

SYSTEM = np.random.default_rng(5).integers(0, VOCAB_SIZE, 40).tolist()
ALWAYS: dict[str, Any] = {"kv_trigger": "always", "kv_stride": 8, "kv_prefill_stride": 24}
KEEPS: list[dict[str, Any]] = [
    {},
    {"kv_policy": "h2o:recent=8", "kv_budget": 24, **ALWAYS},
    {"kv_policy": "keydiff", "kv_budget": 0.5, **ALWAYS},
    {"kv_policy": "snapkv:window=8", "kv_budget": 24, **ALWAYS},
]


def demands() -> list[Demand]:
    random = np.random.default_rng(6)
    found = []
    for i in range(8):
        own = random.integers(0, VOCAB_SIZE, int(random.integers(5, 60))).tolist()
        params = {"max_tokens": int(random.integers(8, 30)), "temperature": float(i % 2), "n": 3 if i in (1, 2) else 1}
        found.append(Demand(SYSTEM + own, seed=100 + i, params={**params, **KEEPS[i % 4]}))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_planted_llama(tmp_path_factory.mktemp("x3"))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_x03_nobody_notices_the_others(folder: Path, kv_cache_dtype: str, preemption: str) -> None:
    common = {"block_size": 8, "max_model_len": 160, "kv_cache_dtype": kv_cache_dtype}
    alone = [record(folder, [demand], num_blocks=100, **common) for demand in demands()]
    swap = {"swap_space": "1MiB"} if preemption == "swap" else {}
    together = record(folder, demands(), num_blocks=30, preemption=preemption, max_num_seqs=12,
                      max_num_batched_tokens=48, **swap, **common)  # fmt: skip
    assert together.tokens == [run.tokens[0] for run in alone]
    assert together.died_at == [run.died_at[0] for run in alone]
    assert together.bits == {key: value for run in alone for key, value in run.bits.items()}
    stats = together.stats
    assert stats.memory.prefix_hit_tokens > 0
    assert stats.memory.forks > 0
    assert stats.scheduler.preemptions > 0
    assert stats.memory.tokens_evicted > 300
