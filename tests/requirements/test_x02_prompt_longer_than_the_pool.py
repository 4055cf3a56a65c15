"""X2: a prompt longer than the whole pool runs under a token budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.driving import Driver, tokens
from tests.engine.recorded import Demand, record
from tests.engine.test_eviction import check_against_dense
from tests.tiny_models import VOCAB_SIZE, save_planted_llama
from vtoken.policies.registry import resolve_policy
from vtoken.schedule.retention import RetentionSettings
from vtoken.schedule.sequence import FinishReason


def test_x02_a_prompt_longer_than_the_whole_pool_runs() -> None:
    driver = Driver(num_blocks=10, block_size=8, max_num_batched_tokens=64, max_model_len=2000,
                    retention=RetentionSettings(resolve_policy("h2o"), 24, "always", 16, 32))  # fmt: skip
    request = driver.add(tokens(1500, 1), 100)
    driver.run()
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert len(request.sequences[0].died_at) == 1596 - 24, "all up to the last place but the budget"


def test_x02_a_prompt_longer_than_the_pool_runs_under_pressure_too() -> None:
    keeps = RetentionSettings(resolve_policy("random"), 24, "pressure", 16, 32)
    driver = Driver(num_blocks=12, block_size=8, max_model_len=1000, enable_prefix_caching=False, retention=keeps)
    request = driver.add(tokens(500, 1), 60)
    driver.run()
    assert request.is_tight
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert driver.counters.preemptions == 0


@pytest.mark.parametrize("trigger", ["always", "pressure"])
def test_x02_on_a_real_model(tmp_path: Path, trigger: str) -> None:
    folder = save_planted_llama(tmp_path)
    prompt = np.random.default_rng(1).integers(0, VOCAB_SIZE, 400).tolist()
    demand = Demand(prompt, seed=1, params={"max_tokens": 12, "temperature": 0.0})
    run = record(folder, [demand], num_blocks=14, block_size=8, max_model_len=500, attention_backend="cpu",
                 kv_policy="h2o", kv_budget=48, kv_trigger=trigger, kv_prefill_stride=32, kv_stride=8,
                 max_num_batched_tokens=64, max_num_seqs=4)  # fmt: skip
    [[choice]] = [output.outputs for output in run.outputs]
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 12)
    assert check_against_dense(folder, [demand], run) >= 400 - 14 * 8
