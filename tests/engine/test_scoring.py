"""Scores of prompts in the whole engine: transformers' own, whatever the memory does; with eviction, those of dense
attention under a mask that hides the dead from their death on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.recorded import Demand, record
from tests.models.dense import dense_causal
from tests.tiny_models import VOCAB_SIZE, save_planted_llama
from vtoken import LLM, SamplingParams
from vtoken.engine.outputs import RequestOutput
from vtoken.models.kernels import BATCH_INVARIANT
from vtoken.models.loader import load_model

PROMPTS = [np.random.default_rng(i).integers(0, VOCAB_SIZE, n).tolist() for i, n in enumerate([150, 1, 2, 95, 61, 130])]
SCORED = {"prompt_logprobs": 0, "temperature": 0.0, "max_tokens": 20}
ALWAYS: dict[str, Any] = {"kv_budget": 40, "kv_trigger": "always", "kv_stride": 16, "kv_prefill_stride": 32}
COMMON: dict[str, Any] = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_planted_llama(tmp_path_factory.mktemp("scored"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[float]]:
    """Of each prompt: the log-probabilities of all tokens but the first, from transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        text = torch.tensor([prompt])
        with torch.inference_mode():
            scores = model(text).logits[0].double().log_softmax(dim=1)
        found.append(scores[:-1].gather(1, text[0, 1:, None])[:, 0].tolist())
    return found


def demands() -> list[Demand]:
    return [Demand(prompt, i, dict(SCORED)) for i, prompt in enumerate(PROMPTS)]


def scores(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None, output.error
    first, *rest = output.prompt_logprobs
    assert first is None
    return [found[token].logprob for token, found in zip(output.prompt_token_ids[1:], rest, strict=True) if found]


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "compiled": {"num_blocks": 200, "attention_backend": "cpu"},
    "one token at a time": {"num_blocks": 200, "max_num_batched_tokens": 8},
    "recompute": {"num_blocks": 36},
    "swap": {"num_blocks": 36, "preemption": "swap", "swap_space": "1MiB"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_are_those_of_transformers(folder: Path, expected: list[list[float]], name: str) -> None:
    run = record(folder, demands(), **(COMMON | SETTINGS[name]))
    for output, right in zip(run.outputs, expected, strict=True):
        np.testing.assert_allclose(scores(output), right, atol=1e-4)
    if name in ("recompute", "swap"):
        assert run.stats.scheduler.preemptions > 0


def test_bits_do_not_depend_on_chunks_or_preemption(folder: Path) -> None:
    alone = [scores(record(folder, [demand], num_blocks=200, **COMMON).outputs[0]) for demand in demands()]
    for name in ("one token at a time", "recompute", "swap"):
        together = record(folder, demands(), **(COMMON | SETTINGS[name]))
        assert [scores(output) for output in together.outputs] == alone, name


def test_a_warm_prefix_cache_is_not_asked(folder: Path, expected: list[list[float]]) -> None:
    with LLM(str(folder), skip_tokenizer_init=True, num_blocks=200, max_model_len=200) as llm:
        plain, scored = SamplingParams(temperature=0.0), SamplingParams(**SCORED)
        llm.generate(PROMPTS, plain, use_tqdm=False)
        outputs = llm.generate(PROMPTS, scored, use_tqdm=False)
        again = llm.generate(PROMPTS, plain, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
    assert again[0].num_cached_tokens > 100
    assert again[0].prompt_logprobs is None
    for output, right in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(scores(output), right, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("policy", ["h2o", "snapkv:window=8", "keydiff", "random"])
def test_with_eviction_they_are_those_of_dense_attention_under_its_mask(
    folder: Path, expected: list[list[float]], policy: str, backend: str
) -> None:
    settings = COMMON | ALWAYS | {"kv_policy": policy, "attention_backend": backend}
    run = record(folder, demands(), num_blocks=60, **settings)
    model = load_model(folder, "float32", BATCH_INVARIANT)
    differences = 0
    for prompt, output, kept in zip(PROMPTS, run.outputs, expected, strict=True):
        text = torch.tensor(prompt)
        with torch.inference_mode():
            deaths = {position: died for position, died in output.outputs[0].died_at.items() if position < len(prompt)}
            attend = dense_causal(model, len(text), deaths)
            hidden = model.hidden_states(text, torch.arange(len(text)), attend)
            right = model.logits(hidden[:-1]).double().log_softmax(dim=1).gather(1, text[1:, None])[:, 0]
        np.testing.assert_allclose(scores(output), right, atol=2e-4)
        differences += int((np.abs(np.array(scores(output)) - kept) > 0.01).sum())
    assert differences > 20  # or nothing was evicted that matters


def test_an_answer_that_is_known_is_scored_as_it_was_drawn(folder: Path) -> None:
    """The scores of an answer, given as the rest of the prompt, are those of the logits that it was drawn from."""
    settings = COMMON | ALWAYS | {"kv_policy": "h2o", "num_blocks": 60, "max_model_len": 300}
    drawn = record(folder, [Demand(PROMPTS[0], 7, {"temperature": 0.0, "max_tokens": 60})], **settings)
    [answer] = drawn.outputs[0].outputs
    logits = np.stack([np.frombuffer(drawn.bits[7, 0, i], np.float32) for i in range(60)])
    right = torch.tensor(logits).double().log_softmax(dim=1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    known = Demand(PROMPTS[0] + answer.token_ids, 8, SCORED | {"max_tokens": 1, "kv_prompt_end": len(PROMPTS[0])})
    run = record(folder, [known], **settings)
    assert scores(run.outputs[0])[-60:] == right.tolist()
    assert len({died for died in answer.died_at.values() if died > len(PROMPTS[0])}) == 3
