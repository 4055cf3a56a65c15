from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Vtoken = Callable[..., Ran]

SMALL = ("--quick", "--workload", "chat", "--policy", "random", "--limit", "4", "--scale", "0.1", "--no-sweeps")


def test_a_run_prints_its_figures_and_writes_both_files(vtoken: Vtoken, tmp_path: Path) -> None:
    files = tmp_path / "found.json", tmp_path / "found.html"
    ran = vtoken("bench", "reclaim", *SMALL, "--json", str(files[0]), "--html", str(files[1]))
    assert ran.code == 0
    assert re.search(r"^ +\d+ s  chat, random, 50% erased, blocks of 16: naive$", ran.err, re.MULTILINE)
    for text in ("All runs", "Targets", "native", "naive", "repack", "vtoken", "partly", "same victims"):
        assert text in ran.out
    found = json.loads(files[0].read_text(encoding="utf-8"))
    assert [run["arm"] for run in found["runs"]] == ["native", "naive", "repack", "vtoken"]
    assert files[1].read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"written: {files[1]}" in ran.err


def test_help_shows_examples_at_80_columns(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = vtoken("bench", "reclaim", "--help").out
    assert out.count("vtoken bench reclaim") >= 4
    for option in ("--workload", "--policy", "--ratio", "--block-size", "--arms", "--shape", "--model", "--device"):
        assert option in out
    for option in ("--pool", "--trace", "--at-once", "--limit", "--scale", "--seed", "--json", "--html", "--quick"):
        assert option in out
    assert "…" not in out
    assert max(map(len, out.splitlines()[1:])) <= 80


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--workload", "chats"], "--workload: unknown 'chats'"),
        (["--policy", "h20"], "--policy: "),
        (["--ratio", "1.5"], "--ratio: expected the share of a text to erase"),
        (["--ratio", "1e-320"], "--ratio: 9.99989e-321 is too little to tell what is left from the whole text"),
        (["--ratio", "1e-17"], "--ratio: 1e-17 is too little"),
        (["--ratio", "half"], "Invalid value for '--ratio'"),
        (["--block-size", "2"], "--block-size: expected a whole number of tokens from 4 to 256, got 2"),
        (["--arms", "native,vtokens"], "--arms: unknown arm 'vtokens'"),
        (["--copies", "later"], "--copies: expected ordered or beside, got 'later'"),
        (["--shape", "gpt-9"], "--shape: unknown model 'gpt-9'"),
        (["--device", "abacus"], "--device: unknown 'abacus'"),
        (["--pool", "large"], "--pool: expected a number of blocks, or auto, got 'large'"),
        (["--pool", "9" * 20], "--pool: expected a number of blocks from 1 to 2147483647, or auto, got 99999"),
        (["--pool", "9" * 5000], "--pool: expected a number of blocks, or auto, got '999"),
        (["--pool", "0"], "--pool: expected a number of blocks from 1 to"),
        (["--pool", str(2**31 - 1)], "--pool: the books and simulated cells of 2147483647 blocks of 16 tokens take"),
        (["--pool", "1"], "--pool: 1 blocks of 16 tokens are too few for chat"),
        (["--limit", "0"], "--limit: expected"),
        (["--limit", "99999999999"], "--limit: expected a number of requests from 1 to 1000000, got 99999999999"),
        (["--scale", "-1"], "--scale: expected"),
        (["--seed", "-1"], "--seed: expected"),
        (["--seed", "9" * 30], "--seed: expected"),
        (["--trace", "/nowhere/t.csv"], "--trace: /nowhere/t.csv cannot be read: No such file"),
        (["--model", "smollm2-135m", "--shape", "llama-3.1-8b"], "leave --shape and --device out"),
        (["--model", "/nowhere/model"], "/nowhere/model does not exist"),
        (["--json", "/nowhere/found.json"], "--json: /nowhere/found.json cannot be written: its folder does not exist"),
        (["--html", "/"], "--html: / is a folder"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(vtoken: Vtoken, line: list[str], said: str) -> None:
    ran = vtoken("bench", "reclaim", "--quick", *line)
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert ran.out == ""


def test_a_missing_matplotlib_is_said_before_anything_runs(
    vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    ran = vtoken("bench", "reclaim", "--html", str(tmp_path / "x.html"))
    assert ran.code == 2
    assert "pip install 'vtoken[bench]'" in ran.err
