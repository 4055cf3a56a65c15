"""The main job on a real model. Slow: it downloads SmolLM2-135M-Instruct (93 MB) unless the cache has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vtoken import LLM, SamplingParams
from vtoken.engine.text import IncrementalDetokenizer
from vtoken.models.catalog import get_model

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
