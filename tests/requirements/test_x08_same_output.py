"""X8 on a real model: the same bits with and without prefix cache, preemption and neighbours; evicted ones too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.recorded import Demand, Recording, record, scattered
from tests.tiny_models import VOCAB_SIZE, save_llama

SYSTEM = np.random.default_rng(5).integers(0, VOCAB_SIZE, 37).tolist()


def _demands() -> list[Demand]:
    random = np.random.default_rng(6)
    demands = []
    for i in range(7):
        own = random.integers(0, VOCAB_SIZE, int(random.integers(1, 60))).tolist()
        prompt = SYSTEM + own if i % 3 else own
        params = {"max_tokens": int(random.integers(4, 30)), "temperature": float(i % 2), "n": 3 if i == 4 else 1}
        demands.append(Demand(prompt, seed=1000 + i, params=params))
    return demands


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("x8"), num_layers=3, hidden_size=96, num_heads=6, num_kv_heads=2)


@pytest.fixture(scope="module")
def alone(folder) -> Recording:
    """Every request by itself, in one chunk, in a roomy pool, with nothing cached."""
    runs = [record(folder, [demand], num_blocks=64, enable_prefix_caching=False) for demand in _demands()]
    return Recording(
        [run.outputs[0] for run in runs], runs[0].stats, {key: value for run in runs for key, value in run.bits.items()}
    )


SETTINGS = {
    "neighbours": {"num_blocks": 200},
    "prefix cache and chunks": {"num_blocks": 200, "max_num_batched_tokens": 24, "max_num_seqs": 24},
    "recompute": {"num_blocks": 14, "max_num_seqs": 8, "max_num_batched_tokens": 64},
    "recompute without prefix cache": {"num_blocks": 14, "enable_prefix_caching": False},
    "swap": {"num_blocks": 14, "preemption": "swap", "swap_space": "1MiB"},
    "blocks of 5": {"num_blocks": 44, "block_size": 5, "max_num_batched_tokens": 40, "max_num_seqs": 9},
    "blocks of 48": {"num_blocks": 5, "block_size": 48},
    "blocks of 4": {"num_blocks": 54, "block_size": 4, "preemption": "swap", "swap_space": "64KiB"},
    "blocks of 256": {"num_blocks": 6, "block_size": 256},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_bits_do_not_depend_on_company(folder, alone, name):
    together = record(folder, _demands(), max_model_len=200, **{"max_num_seqs": 16} | SETTINGS[name])
    assert together.tokens == alone.tokens
    assert together.bits == alone.bits
    if "recompute" in name:
        assert together.stats.scheduler.preemptions_recompute > 0
    if "swap" in name:
        assert together.stats.scheduler.preemptions_swap > 0
    if name.startswith("prefix"):
        assert together.stats.memory.prefix_hit_tokens > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_of_the_compiled_backend_do_not_depend_on_company(folder, alone, name):
    """Linears keep rows apart to the bit, attention within rounding: tokens are equal, logits close."""
    settings = {"max_num_seqs": 16, "attention_backend": "cpu"} | SETTINGS[name]
    together = record(folder, _demands(), max_model_len=200, **settings)
    assert together.tokens == alone.tokens
    for key, bits in alone.bits.items():
        found, expected = (np.frombuffer(part, np.float32) for part in (together.bits[key], bits))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


EVICT = scattered(every=6)


@pytest.fixture(scope="module")
def lone(folder) -> list[Recording]:
    """Every request by itself, losing tokens."""
    runs = [record(folder, [demand], EVICT, num_blocks=64) for demand in _demands()]
    assert sum(len(deaths) for run in runs for [*choices] in run.died_at for deaths in choices) > 100
    return runs


@pytest.mark.parametrize("name", SETTINGS)
def test_bits_of_evicted_sequences_do_not_depend_on_company(folder, lone, name):
    together = record(folder, _demands(), EVICT, max_model_len=200, **{"max_num_seqs": 16} | SETTINGS[name])
    assert together.tokens == [run.tokens[0] for run in lone]
    assert together.died_at == [run.died_at[0] for run in lone]
    assert together.bits == {key: value for run in lone for key, value in run.bits.items()}
