"""One tiny model with a byte-level tokenizer for the tests of the engine's face."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.async_engines import GREEDY, settings
from tests.tiny_models import BOS, EOS, save_llama
from vtoken import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in, text out; knows a BOS and an EOS token."""
    return save_llama(tmp_path_factory.mktemp("llama"), tokenizer=True, bos_token_id=BOS, eos_token_id=EOS)


@pytest.fixture(scope="session")
def expected(folder: Path) -> dict[str, list[int]]:
    """Prompt -> what the engine of `async_engines.settings` answers to it, by `GREEDY`."""
    prompts = ["Tell me", "once upon a time", *(f"number {i}" for i in range(20))]
    with LLM(str(folder), **settings()) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return {output.prompt: output.outputs[0].token_ids for output in outputs}
