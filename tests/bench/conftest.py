from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import save_llama


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a tiny model with 128 positions, once."""
    made: list[Path] = []

    def get() -> Path:
        if not made:
            folder = tmp_path_factory.mktemp("bench-llama")
            made.append(save_llama(folder, tokenizer=True, max_position_embeddings=128))
        return made[0]

    return get
