from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.cli.conftest import Ran
from vtoken.evals import evaluate

Vtoken = Callable[..., Ran]
SMALL = ("--num-blocks", "400", "--attention-backend", "reference")
H2O = ("--policy", "h2o", "--budget", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A token is a byte."""
    return str(tiny_models.save_llama(tmp_path_factory.mktemp("plain"), tokenizer=True))


@pytest.fixture
def questions(tmp_path: Path) -> str:
    file = tmp_path / "questions.jsonl"
    records = [
        {"context": f"It was {color}." * 8, "question": "What?", "answers": [color]} for color in ("red", "blue")
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    return str(file)


def test_perplexity(vtoken: Vtoken, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file, picture = tmp_path / "found.json", tmp_path / "found.svg"
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a cat. " * 20)
    line = ("--length", "256", "--limit", "2", "--text", str(text), *H2O, "--budget", "0.5")
    ran = vtoken("eval", model, *line, "--json", str(file), "--plot", str(picture), *SMALL)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("perplexity: 2 windows of 256 tokens of story.txt")
    first = [row.split()[0] for row in ran.out.splitlines() if row.split()]
    assert first == ["perplexity:", "policy", "full", "h2o", "h2o"]
    found = json.loads(file.read_text())
    assert [(outcome["policy"], outcome["budget"]) for outcome in found["outcomes"]] == [
        (None, None),
        ("h2o", 64),
        ("h2o", 0.5),
    ]
    assert found["outcomes"][1]["kv_prefill_stride"] == 64
    assert found["outcomes"][1]["retained_bytes"] < found["outcomes"][0]["retained_bytes"]
    assert picture.read_text().startswith("<?xml")


def test_needle(vtoken: Vtoken, model: str) -> None:
    line = ("--task", "needle", "--length", "120", "--length", "150", "--depth", "0.5", "--limit", "1")
    ran = vtoken("eval", model, *line, *H2O, "--kv-cache-dtype", "int8", "--kv-cache-dtype", "auto", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("needle: 2 numbers of 6 digits")
    assert ran.out.count("120 tokens") == 4  # a grid for each setting


def test_questions(vtoken: Vtoken, model: str, questions: str) -> None:
    ran = vtoken("eval", model, "--task", "qa", "--file", questions, "--limit", "1", *H2O, "--question-known", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("qa: 1 of 2 questions of questions.jsonl; tokens die after the question")


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "task": (("--task", "poetry"), "poetry"),
    "policy": (("--policy", "h3o", "--budget", "9"), "unknown --kv-policy 'h3o'"),
    "budget": (("--policy", "h2o", "--budget", "many"), "expected a whole number or a share such as 0.5, got 'many'"),
    "no budget": (("--policy", "h2o"), "--budget: expected at least one"),
    "share": (("--policy", "h2o", "--budget", "1.5"), "--kv-budget: expected a whole number of tokens"),
    "too small": (("--policy", "streaming_llm", "--budget", "3"), "is too small for streaming_llm"),
    "format": (("--kv-cache-dtype", "int9"), "--kv-cache-dtype: unknown format 'int9'"),
    "text": (("--text", "/no/such/file"), "--text: /no/such/file cannot be read: No such file or directory"),
    "no file": (("--task", "qa"), "--file: the task qa needs a file of questions"),
    "file": (("--task", "qa", "--file", "/no/such/file"), "--file: /no/such/file cannot be read"),
    "of another task": (("--file", "x"), "--file: the task perplexity takes none; it is for qa"),
    "depth": (("--task", "needle", "--depth", "1.5"), "--depth: expected a share from 0 to 1, got 1.5"),
    "length": (("--length", "2"), "--length: expected a whole number of tokens from 4 up, got 2"),
    "no length": (("--length", "0"), "--length: expected a whole number of tokens from 4 up, got 0"),
    "length below": (("--length", "-5"), "--length: expected a whole number of tokens from 4 up, got -5"),
    "huge window": (("--length", "99999999999"), "tokens, fewer than a window of 99,999,999,999; give a longer text"),
    "huge haystack": (
        ("--task", "needle", "--length", "99999999999"),
        "--length: 99,999,999,999 tokens are more than the ",
    ),
    "huge limit": (("--task", "needle", "--limit", "9" * 12), "--limit: expected a whole number from 1 to 1000000"),
    "seed": (("--task", "needle", "--seed", "9" * 24), "--seed: expected a whole number from -2**63 to 2**64 - 1"),
    "seed below": (("--seed", str(-(2**63) - 1)), "--seed: expected a whole number from -2**63 to 2**64 - 1"),
    "lengths": (("--length", "20", "--length", "30"), "--length: the task perplexity takes one length"),
    "limit": (("--limit", "0"), "--limit: expected a whole number from 1 to 1000000, got 0"),
    "json": (("--json", "/no/such/folder/x.json"), "--json: /no/such/folder/x.json cannot be written: its folder"),
    "plot": (("--plot", "x.doc"), "--plot: 'x.doc' is no picture"),
    "folder": (("--json", "/tmp"), "--json: /tmp is a folder; give the name of a file in it"),
    "known": (("--question-known",), "--question-known: the task perplexity takes none; it is for needle and qa"),
    "engine": (("--block-size", "3"), "--block-size: expected a whole number of tokens from 4 to 256, got 3"),
    "stride": ((*H2O, "--kv-stride", "0"), "--kv-stride: expected a whole number of tokens from 1 up"),
    "short text": (("--length", "1000000"), "--length: the letters of Mary Shelley"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_before_the_weights_are_read(
    vtoken: Vtoken, model: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(evaluate, "LLM", never)
    line, message = MISTAKES[name]
    ran = vtoken("eval", model, *line)
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("content", ["[" * 100_000, '{"data": ' + "[" * 100_000, '{}\n{"context": ' * 50_000])
def test_json_as_deep_as_it_gets_is_one_line(vtoken: Vtoken, model: str, tmp_path: Path, content: str) -> None:
    file = tmp_path / "deep.json"
    file.write_text(content)
    ran = vtoken("eval", model, "--task", "qa", "--file", str(file))
    assert ran.code == 2
    assert "deep.json, line " in ran.err
    assert "no JSON: " in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_full_disk_takes_nothing_of_what_was_found(vtoken: Vtoken, model: str, tmp_path: Path, option: str) -> None:
    full = tmp_path / "found.svg"
    full.symlink_to("/dev/full")
    ran = vtoken("eval", model, "--length", "64", "--limit", "1", *SMALL, option, str(full))
    assert ran.code == 2
    assert ran.err == f"error: {option}: {full} cannot be written: No space left on device\n"
    assert ran.out.startswith("perplexity: 1 windows of 64 tokens")


def test_a_model_that_is_not_there(vtoken: Vtoken) -> None:
    ran = vtoken("eval", "/no/such/model")
    assert ran.code == 2
    assert "/no/such/model" in ran.err
    assert ran.err.count("\n") == 1
