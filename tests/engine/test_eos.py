"""U20: an answer ends with whichever stop id the checkpoint names, wherever it names it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import BOS, save_llama, save_phi3, save_qwen2, save_qwen3
from vtoken import LLM, SamplingParams
from vtoken.engine.outputs import CompletionOutput

MARK = BOS  # a special token, as the marks of chat models are

SAVE: dict[str, Callable[..., Path]] = {
    "llama": save_llama,
    "qwen2": save_qwen2,
    "qwen3": save_qwen3,
    "phi3": save_phi3,
}


def answer(folder: Path, **params: Any) -> CompletionOutput:
    """Of a model that has no choice but `MARK`."""
    with LLM(str(folder), num_blocks=8, max_model_len="auto") as llm:
        (output,) = llm.generate(["ab"], SamplingParams(max_tokens=5, allowed_token_ids=[MARK], **params))
    return output.outputs[0]


def generation_config(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize("family", SAVE)
def test_a_list_in_the_generation_config_alone(family: str, tmp_path: Path) -> None:
    folder = generation_config(SAVE[family](tmp_path / "m", tokenizer=True), json.dumps({"eos_token_id": [2, MARK]}))
    ended = answer(folder)
    assert (ended.finish_reason, ended.text) == ("stop", "")
    went_on = answer(folder, ignore_eos=True)
    assert (went_on.finish_reason, went_on.token_ids) == ("length", [MARK] * 5)


@pytest.mark.parametrize("family", SAVE)
def test_the_union_of_both_files(family: str, tmp_path: Path) -> None:
    folder = SAVE[family](tmp_path / "m", tokenizer=True, eos_token_id=MARK)
    for other in (2, 3):
        generation_config(folder, json.dumps({"eos_token_id": other}))
        assert answer(folder).finish_reason == "stop"


def test_no_file_is_fine_and_a_broken_one_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_qwen2(tmp_path / "m", tokenizer=True, eos_token_id=MARK)
    (folder / "generation_config.json").unlink()
    with caplog.at_level(logging.WARNING, "vtoken"):
        assert answer(folder).finish_reason == "stop"
        assert not caplog.records
        assert answer(generation_config(folder, "{broken")).finish_reason == "stop"
    assert "generation_config.json" in caplog.text
