"""V20: one report shows together: tokens erased, share of partly used blocks, blocks returned, bytes copied, decode
p95, throughput within the SLA."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from vtoken.bench import page, terminal
from vtoken.bench.configure import Asked, configure
from vtoken.bench.reclaim import ReclaimBench
from vtoken.bench.report import Report, from_json, to_json
from vtoken.bench.table import HEADINGS, run_rows

SIX = ("tokens erased", "partly used", "returned", "copied", "p95 ms", "within SLA")


@pytest.fixture(scope="module")
def report() -> Report:
    asked = Asked(workloads=("chat",), policies=("random",), limit=5, scale=0.2, quick=True, sweeps=False)
    return ReclaimBench(replace(configure(asked), probes=False)).run()


def test_one_row_has_all_six(report: Report) -> None:
    row = dict(zip(HEADINGS, run_rows(report.runs)[-1], strict=True))
    assert row["arm"] == "vtoken"
    assert int(row["tokens erased"].replace(",", "")) > 0
    assert row["partly used"].endswith("%")
    assert int(row["returned"].replace(",", "")) > 0
    assert row["copied"] != "0 B"
    assert float(row["p95 ms"]) > 0
    assert int(row["within SLA"].replace(",", "")) >= 0


def test_terminal_page_and_json_show_them_together(report: Report) -> None:
    file = StringIO()
    terminal.show(report, Console(file=file))
    html = page.to_html(report)
    metrics = from_json(to_json(report)).runs[-1].metrics
    row = dict(zip(HEADINGS, run_rows(report.runs)[-1], strict=True))
    line = next(line for line in file.getvalue().splitlines() if line.startswith("vtoken"))
    for heading in SIX:
        assert f">{heading}</th>" in html
        assert f">{row[heading]}</td>" in html
        assert row[heading] in line
    assert metrics == report.runs[-1].metrics
