"""The examples that README and docs show, run as a user would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_models, tiny_tokenizers
from vtoken.base.cache import cache_dir

ROOT = Path(__file__).parents[2]


def run(name: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache in which a tiny model lies under the real one's name; what is compiled and measured is everybody's."""
    cache = tmp_path_factory.mktemp("cache")
    for kind in ("kernels", "linear"):
        shared = cache_dir() / kind
        shared.mkdir(parents=True, exist_ok=True)
        (cache / kind).symlink_to(shared)
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_models.save_llama(cache / "models" / "smollm2-135m", vocab_size=len(tokenizer))
    tiny_tokenizers.save(tokenizer, folder)
    return str(cache)


def test_evict_prints_what_the_page_shows() -> None:
    out = run("evict.py")
    assert f"```\n{out}```" in (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert "2 blocks came back for 2 copies" in out


def test_first_answers_each_prompt(cache: str) -> None:
    lines = run("first.py", VTOKEN_CACHE=cache)
    for prompt in ("The capital of France is", "The chemical symbol of gold is", "The opposite of hot is"):
        assert prompt in lines


def test_budget_says_what_was_evicted(cache: str) -> None:
    evicted, kept = map(
        int, re.search(r"(\d+) tokens were evicted, (\d+) kept", run("budget.py", VTOKEN_CACHE=cache)).groups()
    )
    assert evicted > 0
    assert kept >= 64


def test_steps_end_by_abort_and_by_length(cache: str) -> None:
    ended = dict(re.findall(r"^(\w) ended by (\w+)", run("steps.py", VTOKEN_CACHE=cache), re.MULTILINE))
    assert ended.keys() == {"a", "b"}
    assert ended["b"] in ("length", "stop")
    assert ended["a"] in ("abort", "stop")


def test_stream_prints_an_answer(cache: str) -> None:
    assert run("stream.py", VTOKEN_CACHE=cache).strip()
