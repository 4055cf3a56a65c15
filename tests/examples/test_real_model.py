"""The main job on real models. Slow: downloads SmolLM2-135M-Instruct (93 MB) and Gemma 3 270M (239 MB) once."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from vtoken import LLM, SamplingParams
from vtoken.engine.text import IncrementalDetokenizer
from vtoken.models.catalog import get_model

GEMMA_PROMPTS = ["The chemical symbol of gold is", "1, 2, 3, 4, 5,", "def fibonacci(n):"]
GEMMA_ANSWERS = [" Au", " 6, 7", "\n    if n == 0:"]
PROMPTS = ["The capital of France is", "The chemical symbol of gold is", "The opposite of hot is"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    return get_model("smollm2-135m")


def test_answers_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    # 10 blocks do not hold the three texts at once, so someone is paused and computed again.
    with LLM(str(folder), block_size=4, num_blocks=10, max_model_len="auto") as llm:
        found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        assert llm.stats().scheduler.preemptions > 0
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for answer in found:
        prompt = torch.tensor([answer.prompt_token_ids])
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12
        )
        assert answer.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()
    assert [answer.outputs[0].text.split(".")[0] for answer in found] == [" Paris", " Au", " cold"]


def test_its_text_streams_without_breaking_a_character(folder: Path) -> None:
    with LLM(str(folder), num_blocks=4, max_model_len="auto") as llm:
        tokenizer = llm.get_tokenizer()
    text = "🏳️‍🌈 Žď 你好 नमस्ते e\u0301"
    token_ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [*map(detokenizer.push, token_ids), detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(token_ids) == text


@pytest.fixture(scope="module")
def gemma() -> Path:
    return get_model("gemma3-270m")


def test_gemma_answers_sensibly(gemma: Path) -> None:
    with LLM(str(gemma), num_blocks=16, max_model_len="auto") as llm:
        found = llm.generate(GEMMA_PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [answer.prompt_token_ids[0] for answer in found] == [2] * len(found)  # Gemma is lost without its BOS
    for answer, expected in zip(found, GEMMA_ANSWERS, strict=True):
        assert answer.outputs[0].text.startswith(expected)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gemma_answers_are_those_of_transformers_beyond_its_windows(backend: str, gemma: Path) -> None:
    """Three prompts, two of them longer than the 512 tokens that most layers see; in chunks, in a pool so small
    that they take turns."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gemma)
    text = files("vtoken.evals").joinpath("frankenstein.txt").read_text()
    prompts = [tokenizer.encode(part) for part in (text[:2600], text[20_000:23_500], GEMMA_PROMPTS[0])]
    assert [len(prompt) > 520 for prompt in prompts] == [True, True, False]
    longest = max(map(len, prompts)) + 24
    blocks = -(-longest // 16) + 6
    with LLM(
        str(gemma), attention_backend=backend, num_blocks=blocks, max_model_len=longest, max_num_batched_tokens=256
    ) as llm:
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    reference = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
    for prompt, answer in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, min_new_tokens=24
        )
        assert answer.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
