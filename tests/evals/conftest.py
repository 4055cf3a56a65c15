from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import save_llama
from vtoken.engine.text import Tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes."""
    return save_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)
