"""Tables, targets and the page they are written into."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.figures import Goal, Spread
from benchmarks.peers.records import Record
from benchmarks.peers.report import BEGIN, END, Report, figure, percentiles, table, write_between_markers, write_json
from benchmarks.peers.workloads import WORKLOADS

FACTS = {"cpu": "A CPU", "cores": 2, "flags": ["avx2"], "memory_gib": 23.5}


def record(workload: str, engine: str, round_: int, seconds: float | None, **more: Any) -> Record:
    figures = None
    if seconds is not None:
        figures = {"seconds": seconds, "output_tok_s": 100 / seconds, "total_tok_s": 200 / seconds} | more.pop(
            "plus", {}
        )
    status = "ok" if seconds is not None else "failed"
    at = f"2026-01-0{round_ + 1}T10:00:00+00:00"
    return Record(workload, engine, round_, "print", more.pop("status", status), at, figures=figures, **more)


def rounds(workload: str, engine: str, seconds: Sequence[float], **more: Any) -> list[Record]:
    return [
        record(workload, engine, i, each, startup_s=5.0, others_share=0.02, **more) for i, each in enumerate(seconds)
    ]


def report(records: Sequence[Record], workloads: Sequence[str] = ("W1",), rate: float | None = None) -> Report:
    return Report([WORKLOADS[name] for name in workloads], records, FACTS, rate, Goal(2.0, 0.2))


def row(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [each.strip() for each in line.strip("|").split("|")]


def test_a_row_has_medians_ranges_and_the_ratio_of_each_round() -> None:
    records = [*rounds("W1", "vtoken", [10.0, 20.0, 10.0]), *rounds("W1", "vllm-eager", [30.0, 40.0, 32.0])]
    text = report(records).markdown()
    assert row(text, "vllm-eager")[2:] == ["32.0 (30.0-40.0)", "3 (2-3)", "6 (5-7)", "3.00 (2.00-3.20)", "5"]
    assert row(text, "vtoken")[5] == "1.00 (1.00-1.00)"


def test_one_run_has_no_range() -> None:
    assert figure("seconds", 2)([record("W1", "vtoken", 0, 1.234)]) == "1.23"
    assert figure("first_token_s", 2)([record("W1", "vtoken", 0, 1.0)]) == "-"


def test_waits_are_medians_of_the_rounds() -> None:
    records = [
        record("W5", "vtoken", i, 1.0, plus={f"first_token_p{p}_s": p / 100 + i for p in (50, 95, 99)})
        for i in range(3)
    ]
    assert percentiles("first_token", 2)(records) == "1.50 / 1.95 / 1.99"
    assert percentiles("between_tokens", 2)(records) == "- / - / -"


def test_an_engine_without_a_figure_says_why() -> None:
    records = [*rounds("W1", "vtoken", [10.0]), record("W1", "transformers", 0, None, reason="a | b")]
    assert row(report(records).markdown(), "transformers")[2] == "none: a / b"


def test_targets_take_the_best_peer_of_the_class_and_say_whether_they_are_met() -> None:
    records = [
        *rounds("W1", "vtoken", [10.0, 10.0]),
        *rounds("W1", "vllm-eager", [30.0, 30.0]),
        *rounds("W1", "vllm-zen", [15.0, 15.4]),
        *rounds("W1", "llama-f16", [16.0, 16.0]),
    ]
    text = report(records).markdown()
    target = text[text.index("**Targets**") :]
    assert "| W1 | vtoken | vllm-zen | 1.6 | 1.52 (1.50-1.54) | no |" in target
    assert "| W1 | vtoken | llama-f16 | 1.5 | 1.60 (1.60-1.60) | yes |" in target
    assert "llama-f32" not in target


def test_ratios_need_both_in_the_same_round() -> None:
    made = report([record("W1", "vtoken", 0, 1.0), record("W1", "vllm-eager", 1, 2.0)])
    assert made.ratio("W1", "vllm-eager") is None
    assert report(rounds("W1", "vtoken", [2.0])).ratio("W1", "vtoken") == Spread(1.0, 1.0, 1.0)


def test_agreement_is_the_share_of_equal_tokens_from_the_beginning() -> None:
    records = [
        *rounds("W3", "vtoken", [1.0], outputs=[[1, 2, 3, 4], [5, 6, 7, 8]]),
        *rounds("W3", "vllm-eager", [1.0], outputs=[[1, 2, 3, 4], [5, 9, 7, 8]]),
        *rounds("W3", "llama-f32", [1.0]),
    ]
    text = report(records, ["W3"]).markdown()
    assert row(text, "vllm-eager")[-1] == "62%"
    assert row(text, "llama-f32")[-1] == "-"


def test_arrivals_name_the_rate_and_compare_first_tokens() -> None:
    records = [
        *rounds("W5", "vtoken", [9.0], plus={"first_token_p50_s": 0.5}),
        *rounds("W5", "vllm-eager", [9.0], plus={"first_token_p50_s": 2.0}),
    ]
    text = report(records, ["W5"], rate=1.5).markdown()
    assert "96 at 1.5 a second" in text
    assert row(text, "vllm-eager")[7] == "4.00 (4.00-4.00)"


def test_disturbed_cells_are_owned_up_to() -> None:
    calm = rounds("W1", "vtoken", [1.0, 1.0])
    assert "other processes" not in report(calm).markdown()
    text = report([*calm, record("W1", "vllm-eager", 0, 2.0, others_share=0.4)]).markdown()
    assert "In 1 of 3 cells other processes took more than 10% of the CPU (at most 40%)" in text


def test_the_json_has_every_record_but_not_the_answers(tmp_path: Path) -> None:
    records = rounds("W3", "vtoken", [1.0, 2.0], outputs=[[1, 2]])
    write_json(tmp_path / "new" / "peers.json", report(records, ["W3"]).to_json())
    data = json.loads((tmp_path / "new" / "peers.json").read_text())
    assert [each["figures"]["seconds"] for each in data["records"]] == [1.0, 2.0]
    assert "outputs" not in data["records"][0]
    assert data["facts"]["cpu"] == "A CPU"
    assert data["engines"]["vtoken"]["family"] == "vtoken"


def test_a_page_keeps_what_stands_around_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(f"# Results\n\n{BEGIN}\nold\n{END}\n\n## After\n")
    write_between_markers(page, "new\ntable")
    assert page.read_text() == f"# Results\n\n{BEGIN}\nnew\ntable\n{END}\n\n## After\n"


@pytest.mark.parametrize(("before", "after"), [("# Results\n", "# Results\n\n"), ("", "")])
def test_a_page_without_markers_gets_them_at_its_end(tmp_path: Path, before: str, after: str) -> None:
    page = tmp_path / "results.md"
    page.write_text(before)
    write_between_markers(page, "text")
    assert page.read_text() == f"{after}{BEGIN}\ntext\n{END}\n"


@pytest.mark.parametrize("text", [BEGIN, END, f"{END} {BEGIN}"])
def test_half_a_pair_of_markers_is_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "results.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="in this order, or neither"):
        write_between_markers(page, "new")
    assert page.read_text() == text


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
