"""The example of a client, against a server around a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.test_small_examples import run
from tests.server.serving import serve
from tests.tiny_models import BOS, EOS, save_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = save_llama(tmp_path, tokenizer=True, bos_token_id=BOS, eos_token_id=EOS)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    return folder


def test_the_client_is_told_what_was_evicted(folder):
    with serve(folder, {"max_model_len": 512}, served_model_name="smollm2-135m") as server:
        out = run("client.py", VTOKEN_URL=f"{server.url}/v1")
    kept, evicted = map(int, re.search(r"(\d+) tokens kept, (\d+) evicted\n$", out).groups())
    assert kept >= 40
    assert evicted > 0
