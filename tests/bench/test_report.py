from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.bench.reports import CELL, report, run, sweep
from vtoken.base.errors import ConfigError
from vtoken.bench import page, plots, terminal
from vtoken.bench.report import SCHEMA, Report, from_json, to_json
from vtoken.bench.targets import evaluate

FULL = replace(report(), targets=evaluate(report()))


def test_json_comes_back_as_it_was() -> None:
    assert from_json(to_json(FULL)) == FULL
    assert from_json(to_json(replace(FULL, steady=None, overhead=None))).steady is None


def test_json_says_its_schema_and_has_the_fields_that_the_docs_name() -> None:
    found = json.loads(to_json(FULL))
    assert found["schema"] == SCHEMA
    docs = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for field in (*found, *found["runs"][0]["metrics"], *found["comparisons"][0], *found["sweeps"][0]):
        assert f"`{field}`" in docs, f"docs/bench.md does not say what {field} is"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Invalid JSON"),
        ("{}", "vtoken: Field required"),
        (to_json(replace(FULL, schema="vtoken.bench.reclaim/9")), "has schema 'vtoken.bench.reclaim/9'"),
        (
            to_json(FULL).replace('"steps": 10', '"steps": "ten"', 1),
            "runs.0.metrics.steps: Input should be a valid int",
        ),
    ],
)
def test_what_is_no_report_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(text, "old.json")
    assert said in str(caught.value)
    assert str(caught.value).startswith("old.json ")


@pytest.fixture(scope="module")
def html() -> str:
    return page.to_html(FULL)


def test_the_page_asks_for_nothing_from_elsewhere(html: str) -> None:
    assert "://" not in re.sub(r'src="data:image/png;base64,[^"]*"', "", html), "no address of any kind"
    sources = re.findall(r'(?:src|href|url|@import)\s*[=(]\s*["\']?([^"\')\s>]{0,25})', html)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<(script|link|iframe|object|embed)\b", html)


def test_the_page_shows_all_there_is(html: str) -> None:
    assert html.count("<img ") == 5, "retained, running, occupancy, slots, throughput against latency"
    for text in (
        "Targets: 10 of 10 met",
        "All runs",
        "Settings",
        "Machine",
        "A &lt;fast&gt; one",
        "lengths &amp; where",
    ):
        assert text in html
    assert html.count("1,234") == 3, "one row a run"


def test_the_page_escapes_what_users_and_machines_call_things() -> None:
    named = replace(FULL, machine={"<b>": "<script>alert(1)</script>"}, pictures=[], sweeps=[])
    assert "<script" not in page.to_html(named)


def test_a_page_without_pictures_and_sweeps_can_be_made() -> None:
    bare = Report("0", "now", {}, {}, [], [], [])
    assert "<img" not in page.to_html(bare)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'vtoken\[bench\]'"):
        page.to_html(FULL)


def test_reports_are_read_and_written_without_matplotlib() -> None:
    code = (
        "import sys; from vtoken.bench import configure, page, report, terminal; assert 'matplotlib' not in sys.modules"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)


def test_plots_are_png_images() -> None:
    picture = FULL.pictures[0]
    assert picture.slots_before is not None
    assert picture.slots_after is not None
    images = [
        plots.retained_over_time(picture),
        plots.running_over_time(picture),
        plots.occupancy(picture),
        plots.slots(picture.slots_before, picture.slots_after),
        plots.throughput_against_latency([sweep("naive"), sweep("vtoken")]),
    ]
    assert all(image.startswith(b"\x89PNG") for image in images)
    assert len(set(images)) == 5


def test_axes_of_whole_numbers_have_whole_ticks() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.set_xlim(-0.5, 4.5)
    plots._whole_numbers(axes.xaxis)
    assert [tick for tick in axes.get_xticks() if -0.5 <= tick <= 4.5] == [0, 1, 2, 3, 4]


def test_the_map_of_slots_is_cut_into_lines_of_blocks() -> None:
    tiles = plots._tiles(["3210"] * 65)
    assert tiles.shape == (9, 64)
    assert tiles[:5, 0].tolist() == [3, 2, 1, 0, -1]
    assert tiles[5:, 0].tolist() == [3, 2, 1, 0], "the 65th block"
    assert (tiles[5:, 1:] == -1).all()
    assert np.unique(tiles).tolist() == [-1, 0, 1, 2, 3]


def test_the_terminal_gets_whole_lines_in_a_file() -> None:
    file = StringIO()
    terminal.show(FULL, Console(file=file))
    lines = file.getvalue().splitlines()
    title = lines.index(next(line for line in lines if line.startswith("chat, h2o, 50% erased, blocks of 16")))
    row = next(line for line in lines[title:] if line.startswith("vtoken"))
    for figure in ("1,234", "25%", "8.50", "8.00", "77", "64 MiB", "6.5/9", "20.00", "42", "1.50"):
        assert figure in row
    assert "…" not in file.getvalue()
    assert max(map(len, lines)) <= terminal.NARROWEST
    assert any("retained blocks against naive" in line and "46.9 %" in line for line in lines)
    assert any(str(CELL) in line and "140" in line for line in lines)


def test_a_narrow_terminal_gets_several_tables_and_no_broken_cell() -> None:
    wide = replace(FULL, runs=[run("vtoken", bytes_copied=int(116.88 * 2**20), tokens_erased=1_234_567)])
    file = StringIO()
    Console(file=file, width=60).print(terminal.tables(wide, 60))
    lines = file.getvalue().splitlines()
    assert sum(line.startswith("vtoken") for line in lines) >= 3
    assert "116.88 MiB" in file.getvalue()
    assert "1,234,567" in file.getvalue()
    assert max(map(len, lines)) <= 60


def test_the_terminal_explains_columns_and_only_counts_what_was_not_measured() -> None:
    bare = replace(FULL, sweeps=[], steady=None, overhead=None)
    file = StringIO()
    terminal.show(replace(bare, targets=evaluate(bare)), Console(file=file))
    found = file.getvalue()
    for column in ("partly used", "over floor", "gap p95", "within SLA", "at once"):
        assert f"{column}:" in found.replace("\n", " ") or f"({column}:" in found.replace("\n", " ")
    assert "Targets: 5 of 5 met" in found
    assert "5 more need settings that did not run here" in found
    assert "not measured" not in found
    assert not re.search(r"\b[VX]\d+\b", found), "no row of the requirements book"
