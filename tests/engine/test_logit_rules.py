"""Penalties and other rules in the whole engine: as transformers has them, and the same whatever the memory did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.tiny_models import VOCAB_SIZE, save_llama
from vtoken import LLM, SamplingParams
from vtoken.base.errors import RequestError

RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 1.1, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {5: 3.0, 9: -100.0}},
    "allowed": {"allowed_token_ids": list(range(20, 90))},
}
MEMORIES: list[dict[str, Any]] = [
    {},
    {"num_blocks": 17},
    {"num_blocks": 17, "preemption": "swap", "swap_space": "1MiB"},
    {"max_num_batched_tokens": 13, "max_num_seqs": 8},
    {"attention_backend": "reference"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("rules"))


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    common = random.integers(3, VOCAB_SIZE, 20).tolist()
    return [common + random.integers(3, VOCAB_SIZE, length).tolist() for length in (5, 17, 31, 9)]


def answers(folder: Path, params: SamplingParams, **settings: Any) -> list[list[list[int]]]:
    common = {"num_blocks": 80, "block_size": 8, "max_model_len": 96, "skip_tokenizer_init": True}
    with LLM(str(folder), **(common | settings)) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        again = llm.generate(prompts()[:1], params, use_tqdm=False)  # its prompt is cached now
        assert [c.token_ids for c in again[0].outputs] == [c.token_ids for c in outputs[0].outputs]
        return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", RULES)
def test_what_the_memory_does_changes_nothing(folder: Path, name: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, n=2, ignore_eos=True, **RULES[name])
    expected = answers(folder, params, enable_prefix_caching=False)
    plain = answers(folder, params.replace(**{key: type(params)().__getattribute__(key) for key in RULES[name]}))
    assert expected != plain, "the rule does something"
    for settings in MEMORIES:
        assert answers(folder, params, **settings) == expected, settings


@pytest.mark.parametrize("name", RULES)
def test_they_count_the_dead_too(folder: Path, name: str) -> None:
    """An evicted token was said all the same; and what dies at fixed places does not depend on the memory."""
    eviction = {"kv_policy": "streaming_llm", "kv_budget": 16, "kv_stride": 8, "kv_prefill_stride": 16}
    draws = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "n": 2, "ignore_eos": True}
    params = SamplingParams(**draws, **eviction, kv_trigger="always", **RULES[name])
    roomy, tight = answers(folder, params), answers(folder, params, num_blocks=17)
    assert roomy == tight
    if name == "allowed":
        assert {token for output in roomy for answer in output for token in answer} <= set(
            RULES[name]["allowed_token_ids"]
        )
    never = params.replace(presence_penalty=2.0, logit_bias=dict.fromkeys(range(90), -100.0) | {9: 1.0, 10: 0.5})
    for output in answers(folder, never.replace(temperature=0.0, repetition_penalty=1e6, allowed_token_ids=None)):
        for answer in output:
            assert len(set(answer[:12])) == 12, "what was said is never said again, dead or alive"


def test_the_repetition_penalty_is_that_of_transformers(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = answers(folder, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, repetition_penalty=1.5))
    for prompt, [answer] in zip(prompts(), found, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, min_new_tokens=16,
                                  do_sample=False, repetition_penalty=1.5, pad_token_id=0)  # fmt: skip
        # transformers rules the end out to reach min_new_tokens; ours may draw it, and goes on.
        if not set(answer) & {0, 1, 2}:
            assert answer == expected[0, len(prompt) :].tolist()


def test_nothing_ends_an_answer_before_min_tokens(folder: Path) -> None:
    [[free], *_] = answers(folder, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    stop = [free[3]]
    [[short], *_] = answers(
        folder, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=stop)
    )
    assert len(short) <= 4
    params = SamplingParams(max_tokens=20, min_tokens=10, temperature=0.0, ignore_eos=True, stop_token_ids=stop)
    [[longer], *_] = answers(folder, params)
    assert len(longer) >= 10
    assert stop[0] not in longer[:10]


def test_a_request_that_rules_out_everything_fails_alone(folder: Path) -> None:
    with LLM(str(folder), num_blocks=40, max_model_len=96, skip_tokenizer_init=True) as llm:
        impossible = SamplingParams(max_tokens=8, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=4)
        good = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        bad, fine = llm.generate(prompts()[:2], [impossible, good], use_tqdm=False)
        assert "ruled out every token" in (bad.error or "")
        assert len(fine.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 is more than max_tokens=8"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias: expected token ids below the vocabulary size"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids: expected token ids below"),
    ],
)
def test_what_cannot_be_is_refused_at_once(folder: Path, params: dict[str, Any], message: str) -> None:
    with (
        LLM(str(folder), num_blocks=40, max_model_len=96, skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match=message),
    ):
        llm.generate(prompts()[:1], SamplingParams(**params), use_tqdm=False)
