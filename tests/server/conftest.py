"""One tiny model with a chat template, and one server around it for the tests that need no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import Served, serve, until
from tests.tiny_models import BOS, EOS, save_llama

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in, text out; knows a BOS and an EOS token."""
    folder = save_llama(
        tmp_path_factory.mktemp("served"),
        tokenizer=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        max_position_embeddings=2048,
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def shared_server(folder: Path) -> Iterator[Served]:
    with serve(folder) as served:
        yield served


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """Idle and whole again after each test."""
    yield shared_server
    until(shared_server.is_idle)
    shared_server.ask(lambda engine: engine.scheduler.check())
