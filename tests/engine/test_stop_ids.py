"""Stop ids of every family: those of config, generation_config and tokenizer together (behaviour U20)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import EOS, save_gemma2, save_gemma3, save_gpt2, save_llama, save_mistral, save_opt
from vtoken import LLM, SamplingParams

FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": save_llama,
    "mistral": save_mistral,
    "gpt2": save_gpt2,
    "opt": save_opt,
    "gemma2": save_gemma2,
    "gemma3": save_gemma3,
}
IN_CONFIG, IN_GENERATION = ord("c"), [ord("g"), ord("h")]


def start(folder: Path) -> LLM:
    return LLM(str(folder), num_blocks=8, max_model_len="auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_any_of_them_ends_an_answer(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path / "model", eos_token_id=IN_CONFIG, tokenizer=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": IN_GENERATION}))
    with start(folder) as llm:
        for stop_id in (IN_CONFIG, *IN_GENERATION, EOS):
            forced = SamplingParams(logit_bias={stop_id: 100.0}, temperature=0, max_tokens=4)
            for params, tokens, reason in (
                (forced, [stop_id], "stop"),
                (forced.replace(ignore_eos=True), [stop_id] * 4, "length"),
            ):
                [answer] = llm.generate("ab", params, use_tqdm=False)[0].outputs
                assert (answer.token_ids, answer.finish_reason) == (tokens, reason)
                assert reason == "length" or answer.text == ""


@pytest.mark.parametrize("generation", [None, "{broken"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_readable_generation_config_the_others_count(
    family: str, generation: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = FAMILIES[family](tmp_path / "model", eos_token_id=IN_CONFIG, tokenizer=True)
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(generation)
    with caplog.at_level(logging.WARNING), start(folder) as llm:
        assert llm.engine.scheduler.config.eos_token_ids == {IN_CONFIG, EOS}
    assert ("generation_config.json" in caplog.text) == (generation is not None)
