"""One tiny model with a byte-level tokenizer for the tests of the engine's face."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import BOS, EOS, save_llama


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in, text out; knows a BOS and an EOS token."""
    return save_llama(tmp_path_factory.mktemp("llama"), tokenizer=True, bos_token_id=BOS, eos_token_id=EOS)
