from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests import tiny_models, tiny_tokenizers

SHARING = Path(__file__).parents[2] / "examples" / "sharing.py"


def test_it_shows_every_kind_of_memory_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_models.save_llama(tmp_path, vocab_size=len(tokenizer), max_position_embeddings=2048)
    tiny_tokenizers.save(tokenizer, folder)
    spec = importlib.util.spec_from_file_location("sharing", SHARING)
    assert spec is not None
    assert spec.loader is not None
    sharing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sharing)
    monkeypatch.setattr(sharing, "get_model", lambda name, progress: folder)
    # This tokenizer needs several times the tokens that the real one does for the same text.
    monkeypatch.setattr(sharing, "NUM_BLOCKS", 40)
    monkeypatch.setenv("COLUMNS", "120")
    sharing.main()
    out = capsys.readouterr().out
    for prompt in [*sharing.QUESTIONS, sharing.SAMPLED, *sharing.FOLLOW_UPS]:
        assert prompt in out
    figures = {line.split("  ")[0].strip(): line.replace(",", "").split() for line in out.splitlines()}
    for name in ("prefix hits", "forks", "copies on write", "forgotten", "preemptions"):
        number = next(int(word) for word in figures[name] if word.isdigit())
        assert number > 0, f"no {name}"
