"""Eviction by policy in the whole engine: every logit is that of dense attention over the full text with a mask that
hides exactly the tokens that were evicted, from the length at which they died."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.recorded import Demand, Recording, record
from tests.models.dense import dense_causal
from tests.tiny_models import VOCAB_SIZE, save_planted_llama
from vtoken import LLM, SamplingParams
from vtoken.models.kernels import BATCH_INVARIANT
from vtoken.models.loader import load_model
from vtoken.policies.registry import BUILT_IN

# Small enough for texts of 150 tokens: windows and runs of the defaults are longer.
SMALL = {
    "scissorhands": "scissorhands:window=16",
    "snapkv": "snapkv:window=8",
    "rkv": "rkv:stride=16",
    "lagkv": "lagkv:lag=16",
    "expected_attention": "expected_attention:window=16",
}
POLICIES = [SMALL.get(name, name) for name in BUILT_IN]
ALWAYS: dict[str, Any] = {"kv_budget": 40, "kv_trigger": "always", "kv_stride": 16, "kv_prefill_stride": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_planted_llama(tmp_path_factory.mktemp("eviction"))


def demands(count: int = 3) -> list[Demand]:
    random = np.random.default_rng(8)
    lengths = [150, 61, 20, 95, 130, 44][:count]
    prompts = [random.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]
    return [Demand(prompt, i, {"max_tokens": 36, "temperature": 0.0}) for i, prompt in enumerate(prompts)]


def check_against_dense(folder: Path, demands: list[Demand], run: Recording) -> int:
    """Hold the logits of each drawn token to dense attention. Returns the number of deaths."""
    model = load_model(folder, "float32", BATCH_INVARIANT)
    num_deaths = 0
    for demand, output in zip(demands, run.outputs, strict=True):
        for choice in output.outputs:
            text = torch.tensor(demand.prompt + choice.token_ids[:-1])
            with torch.inference_mode():
                attend = dense_causal(model, len(text), choice.died_at)
                hidden = model.hidden_states(text, torch.arange(len(text)), attend)
                expected = model.logits(hidden[len(demand.prompt) - 1 :]).numpy()
            found = [
                np.frombuffer(run.bits[demand.seed, choice.index, i], np.float32) for i in range(len(choice.token_ids))
            ]
            np.testing.assert_allclose(np.stack(found), expected, atol=2e-4, rtol=1e-4)
            num_deaths += len(choice.died_at)
            assert choice.num_evicted == len(choice.died_at)
            assert choice.num_kept + choice.num_evicted == len(demand.prompt) + len(choice.token_ids)
    return num_deaths


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_what_dense_attention_gives_under_its_mask(folder: Path, policy: str, backend: str) -> None:
    run = record(folder, demands(), num_blocks=60, block_size=8, attention_backend=backend, kv_policy=policy,
                 max_num_batched_tokens=64, max_num_seqs=8, **ALWAYS)  # fmt: skip
    assert check_against_dense(folder, demands(), run) > 200
    assert run.stats.memory.tokens_evicted == sum(len(deaths) for [deaths] in run.died_at)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize("policy", POLICIES)
def test_under_pressure_too(folder: Path, policy: str, backend: str) -> None:
    run = record(folder, demands(6), num_blocks=44, block_size=8, attention_backend=backend, kv_policy=policy,
                 max_num_batched_tokens=64, max_num_seqs=8, max_model_len=200, kv_budget=24, kv_stride=16,
                 kv_prefill_stride=32)  # fmt: skip
    assert check_against_dense(folder, demands(6), run) > 0
    assert run.stats.scheduler.tokens_evicted_under_pressure > 0


SETTINGS: dict[str, dict[str, Any]] = {
    "small pool": {"num_blocks": 24},
    "recompute": {"num_blocks": 22},
    "swap": {"num_blocks": 22, "preemption": "swap", "swap_space": "1MiB"},
    "other chunks": {"num_blocks": 100, "max_num_batched_tokens": 19},
    "blocks of 5": {"num_blocks": 160, "block_size": 5},
    "naive": {"num_blocks": 160, "kv_mode": "naive"},
    "repack": {"num_blocks": 160, "kv_mode": "repack"},
    "no prefix cache": {"num_blocks": 100, "enable_prefix_caching": False},
    "beside": {"num_blocks": 24, "kv_copies": "beside"},
}


COMMON: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 8}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], list[Recording]]:
    """Each of six requests by itself, under a policy."""

    def recorded(policy: str) -> list[Recording]:
        settings = {"num_blocks": 60, "kv_policy": policy} | COMMON | ALWAYS
        return [record(folder, [demand], **settings) for demand in demands(6)]

    return cache(recorded)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "policy",
    ["h2o", *(pytest.param(name, marks=pytest.mark.slow) for name in ("snapkv:window=8", "keydiff"))],
)
def test_x08_bits_and_victims_at_a_fixed_budget_depend_on_the_request_alone(
    folder: Path, alone: Callable[[str], list[Recording]], policy: str, name: str
) -> None:
    runs = alone(policy)
    together = record(folder, demands(6), kv_policy=policy, **{**COMMON, **ALWAYS, **SETTINGS[name]})
    assert together.died_at == [run.died_at[0] for run in runs]
    assert together.tokens == [run.tokens[0] for run in runs]
    assert together.bits == {key: value for run in runs for key, value in run.bits.items()}
    if name == "recompute":
        assert together.stats.scheduler.preemptions_recompute > 0
    if name == "swap":
        assert together.stats.scheduler.preemptions_swap > 0


def test_copies_beside_the_steps_outlive_no_request(folder: Path) -> None:
    """Whoever ends last, no block stays pinned."""
    settings = {"num_blocks": 24, "block_size": 8, "max_model_len": "auto", "max_num_seqs": 8,
                "max_num_batched_tokens": 64}  # fmt: skip
    eviction = {"kv_policy": "knorm", "kv_budget": 24, "kv_stride": 16, "kv_prefill_stride": 16}
    with LLM(str(folder), skip_tokenizer_init=True, kv_copies="beside", **settings, **eviction) as llm:
        engine = llm.engine
        for max_tokens in range(1, 24):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            llm.generate([demand.prompt for demand in demands(3)], params, use_tqdm=False)
            assert not engine.scheduler.memory.moves
            assert not engine.scheduler.memory.pool.pins.any()
