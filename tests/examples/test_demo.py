"""The demo on a tiny model: what it says is what it did."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import tiny_models, tiny_tokenizers
from tests.bench.reports import METRICS
from vtoken.bench.report import Cell, RunReport

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_models.save_llama(tmp_path / "model", vocab_size=len(tokenizer))
    tiny_tokenizers.save(tokenizer, folder)
    demo = load()
    monkeypatch.setattr(demo, "get_model", lambda name, progress: folder)
    monkeypatch.setattr(demo, "PAGE", tmp_path / "found.html")
    monkeypatch.setenv("COLUMNS", "120")
    num_threads = torch.get_num_threads()
    try:
        demo.main()
    finally:
        torch.set_num_threads(num_threads)
    assert (tmp_path / "found.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_it_shows_four_arms_that_lost_the_same_and_says_what_came_back(said: tuple[str, str]) -> None:
    out, err = said
    assert "8 requests, memory for 4: half of every text dies" in out
    rows = {
        line.split()[0]: line.split()[1:]
        for line in out.splitlines()
        if re.match(r"(native|naive|repack|vtoken) +\d", line)
    }
    assert list(rows) == ["native", "naive", "repack", "vtoken"]
    assert float(rows["vtoken"][0]) < float(rows["naive"][0])
    assert float(rows["vtoken"][2]) > float(rows["native"][2]), "requests at once"
    assert "the other three lost the same" in out
    closing = next(line for line in out.splitlines() if line.startswith("The same"))
    assert closing.count("KiB") + closing.count("MiB") == 3, "naive's, vtoken's, and what was moved"
    assert [line.rpartition(": ")[2] for line in err.splitlines() if " s  " in line] == list(rows), "a line a stage"


@pytest.mark.parametrize(("throughput", "words"), [(70.0, "faster than native"), (50.0, "about as"), (40.0, "slower")])
def test_it_says_why_it_is_as_fast_as_it_is(throughput: float, words: str) -> None:
    demo = load()
    runs = {
        arm: RunReport(Cell("demo", "h2o", 0.5, 16, 56), arm, replace(METRICS, tokens_computed=4000), 0)
        for arm in ("native", "naive", "vtoken")
    }
    runs["vtoken"] = replace(runs["vtoken"], metrics=replace(METRICS, throughput=throughput, tokens_computed=3000))
    told = demo.about_speed(runs)
    assert words in told
    assert "tokens twice instead of" in told
