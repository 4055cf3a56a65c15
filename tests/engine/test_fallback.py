"""Models of transformers in the engine: the answers are `transformers.generate`'s, whatever memory and policies do."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.recorded import Demand, record
from tests.models.test_fallback import FAMILIES
from tests.tiny_models import VOCAB_SIZE, save_any
from vtoken import LLM, SamplingParams
from vtoken.base.errors import ConfigError, RequestError
from vtoken.policies.registry import BUILT_IN

NEW_TOKENS = 12
SETTINGS = {"num_blocks": 12, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64}


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    shared = random.integers(0, VOCAB_SIZE, 33).tolist()
    return [[*shared, i, *random.integers(0, VOCAB_SIZE, 3 * i).tolist()] for i in range(4)] + [[1]]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    folder = save_any(tmp_path / "model", family, **FAMILIES[family])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [
        theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]
    demands = [Demand(prompt, i, {"max_tokens": NEW_TOKENS, "temperature": 0.0}) for i, prompt in enumerate(prompts())]
    batched = record(folder, demands, attention_backend=backend, **SETTINGS)
    assert [choices[0] for choices in batched.tokens] == expected
    assert batched.stats.memory.prefix_hit_tokens > 0
    alone = record(folder, demands[:1], attention_backend=backend, **SETTINGS)
    assert alone.tokens[0][0] == expected[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_any(tmp_path_factory.mktemp("model"), "StableLm")


@pytest.mark.parametrize(
    ("policy", "trigger"),
    [("h2o", "pressure"), *((name, "always") for name in sorted(BUILT_IN.keys() - {"expected_attention"}))],
)
def test_policies_run(policy: str, trigger: str, folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    settings = {"num_blocks": 20, "block_size": 4, "max_model_len": 80, "skip_tokenizer_init": True}
    with LLM(str(folder), kv_policy=policy, kv_budget=36, kv_trigger=trigger, **settings) as llm:
        answers = llm.generate(prompts()[:3], params)
    assert sum(answer.outputs[0].num_evicted for answer in answers) > 0
    assert all(len(answer.outputs[0].token_ids) == 24 for answer in answers)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "int8"},
        {"linear_backend": "vtoken_f32"},
        {"preemption": "swap", "swap_space": "1MiB"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_settings_work_as_with_a_family_of_our_own(settings: dict[str, str], folder: Path) -> None:
    demands = [Demand(prompt, i, {"max_tokens": NEW_TOKENS, "temperature": 0.0}) for i, prompt in enumerate(prompts())]
    ours = record(folder, demands, attention_backend="cpu", **(SETTINGS | settings))
    exact = record(folder, demands, attention_backend="cpu", **SETTINGS)
    if not {"linear_backend", "preemption"} & settings.keys():
        first = (0, 0, 0)
        found, expected = (np.frombuffer(run.bits[first], np.float32) for run in (ours, exact))
        assert np.median(np.abs(found - expected)) < 0.1 * expected.std()
    else:
        assert ours.tokens == exact.tokens


def test_nothing_is_said_about_replays(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "vtoken"),
        LLM(str(folder), num_blocks=10, max_model_len=64, skip_tokenizer_init=True) as llm,
    ):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert not [record for record in caplog.records if "replay" in record.message]


def test_a_policy_that_needs_queries_before_they_are_turned_is_refused(folder: Path) -> None:
    settings = {"num_blocks": 10, "max_model_len": 64, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="'expected_attention' needs .* cannot be had of StableLmForCausalLM"):
        LLM(str(folder), kv_policy="expected_attention", kv_budget=16, **settings)
    with (
        LLM(str(folder), **settings) as llm,
        pytest.raises(RequestError, match="needs FutureAttention, which this model"),
    ):
        llm.generate([[1, 2, 3]], SamplingParams(kv_policy="expected_attention", kv_budget=16))
