"""Tables, JSON and the picture, of an evaluation made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from vtoken.base.errors import ConfigError
from vtoken.evals.evaluate import Evaluation, Outcome
from vtoken.evals.needle import Needle
from vtoken.evals.perplexity import Perplexity
from vtoken.evals.plot import check_plot, draw
from vtoken.evals.report import cell_tables, headline, main_table, to_json
from vtoken.evals.setting import make_grid
from vtoken.evals.task import Cell, Grade
from vtoken.evals.texts import Text

TEXT = Text("a text", "")


def perplexity() -> Evaluation:
    grid = make_grid(["h2o", "expected_attention"], [256], ["auto", "int8"])
    outcomes = [
        Outcome(setting, Grade({"perplexity": 20.0 + i, "logprob": -3.0}), (10 - i) * 2.0**20, 2**24, 1 - i / 10, 1.5)
        for i, setting in enumerate(grid.settings)
    ]
    return Evaluation("tiny", Perplexity(TEXT, 64, 1), tuple(outcomes))


def needle() -> Evaluation:
    cells = (
        Cell(0.0, 512, 2, 2, -0.25),
        Cell(0.0, 1024, 1, 2, -1.0),
        Cell(1.0, 512, 0, 2, -4.0),
        Cell(1.0, 1024, 2, 2, 0),
    )
    [setting] = make_grid([], [], ["auto"]).settings
    outcome = Outcome(setting, Grade({"found": 0.625, "logprob": float("-inf")}, cells), None, 2**24, 1.0, 1.5)
    return Evaluation("tiny", Needle(TEXT, (512, 1024), (0.0, 1.0), 2, 0, False), (outcome,))


def shown(*tables: object, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables:
        console.print(table)
    return console.export_text()


def test_a_line_a_setting() -> None:
    lines = [line.split() for line in shown(main_table(perplexity())).splitlines()]
    assert lines[0] == [
        "policy",
        "budget",
        "KV",
        "retained",
        "of",
        "full",
        "kept",
        "perplexity",
        "nats/token",
        "seconds",
    ]
    assert lines[1] == ["full", "cache", "auto", "10", "MiB", "100%", "100%", "20.000", "-3.0000", "1.5"]
    assert lines[3] == ["expected_attention", "256", "auto", "8", "MiB", "80%", "80%", "22.000", "-3.0000", "1.5"]
    assert lines[5] == ["h2o", "256", "int8", "6", "MiB", "60%", "60%", "24.000", "-3.0000", "1.5"]
    assert "…" not in shown(main_table(perplexity()))


def test_one_format_needs_no_column() -> None:
    assert " KV " not in shown(main_table(needle()))
    assert headline(needle()).startswith("needle: 0 numbers of 6 digits")


def test_needles_by_depth_and_length() -> None:
    [(title, table)] = cell_tables(needle())
    lines = [line.split() for line in shown(table).splitlines()]
    assert title == "full cache"
    assert ["0%", "2/2", "(-0.25)", "1/2", "(-1.00)"] in lines
    assert ["100%", "0/2", "(-4.00)", "2/2", "(0.00)"] in lines
    assert cell_tables(perplexity()) == []


def test_json_has_every_figure() -> None:
    found = json.loads(json.dumps(to_json(needle()), allow_nan=False))
    assert found["task"] == "needle"
    [outcome] = found["outcomes"]
    assert outcome["policy"] is outcome["retained_bytes"] is outcome["logprob"] is None
    assert outcome["found"] == 0.625
    assert outcome["cells"][1] == {"depth": 0.0, "length": 1024, "found": 1, "tried": 2, "logprob": -1.0}
    assert to_json(perplexity())["outcomes"][5] == {
        "policy": "expected_attention",
        "budget": 256,
        "kv_cache_dtype": "int8",
        "kv_stride": None,
        "kv_prefill_stride": None,
        "retained_bytes": 5 * 2.0**20,
        "peak_bytes": 2**24,
        "kept": 0.5,
        "seconds": 1.5,
        "perplexity": 25.0,
        "logprob": -3.0,
    }


def test_the_picture_says_what_is_what(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    check_plot(path)
    draw(perplexity(), path)
    picture = path.read_text()
    # matplotlib writes each text of an SVG as a comment above its outlines.
    for text in ("MiB of KV blocks held a sequence", "perplexity (lower is better)", "expected_attention, int8"):
        assert f"<!-- {text} -->" in picture
    with pytest.raises(ConfigError, match="plot: 'memory.txt' is no picture; give a name that ends in one of .*svg"):
        check_plot(tmp_path / "memory.txt")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"plot: matplotlib is not installed; pip install 'vtoken\[bench\]'"):
        check_plot(tmp_path / "memory.svg")
