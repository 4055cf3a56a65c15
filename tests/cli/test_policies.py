from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tests.policies.distributions import install
from tests.policies.test_registry import GOOD
from vtoken.policies.registry import BUILT_IN

Vtoken = Callable[..., Ran]


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One package with a policy, and one that cannot be imported."""
    install(tmp_path, monkeypatch, "acme-kv", {"newest": "acme_kv:Newest"}, {"acme_kv.py": GOOD})
    install(tmp_path, monkeypatch, "broken-kv", {"torn": "broken_kv:Torn"}, {"broken_kv.py": "import nowhere_at_all"})


def facts(out: str) -> dict[str, dict[str, str]]:
    """What is shown of each policy: name -> kind of fact -> text."""
    found: dict[str, dict[str, str]] = {}
    for line in out.splitlines():
        name, kind, text = re.split(" {2,}", line.rstrip(), maxsplit=2)
        if name:
            found[name] = {}
        found[list(found)[-1]][kind] = text
    return found


def test_every_policy_is_shown_with_what_it_reads_and_protects(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    ran = vtoken("policies", *BUILT_IN, "newest", "torn")
    assert (ran.code, ran.err) == (0, "")
    shown = facts(ran.out)
    assert list(shown) == [*BUILT_IN, "newest", "torn"]
    assert shown["h2o"]["in short"].startswith("Half of the budget is for the most recent tokens, half for ")
    assert "in short" not in shown["newest"]
    assert shown["h2o"]["reads"] == "attention of all queries"
    assert shown["h2o"]["protects"] == "the last tokens, 50% of the budget"
    assert shown["h2o"]["decides"] == "every 512 in a prompt, every block of an answer"
    assert shown["h2o"]["source"].startswith("arXiv:2306.14048")
    assert shown["expected_attention"]["protects"] == "the first 4 tokens and the last token"
    assert shown["snapkv"]["protects"] == "the last 32 tokens"
    assert shown["snapkv"]["decides"] == "at the end of a prompt, every 32 tokens of an answer"
    assert shown["snapkv"]["also takes"] == "window=32, kernel=5"
    assert shown["paged_eviction"]["decides"].startswith("on whole blocks, ")
    assert shown["random"]["reads"] == "positions only"


def test_policies_of_packages_are_shown_and_the_broken_ones_with_their_error(
    vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = facts(vtoken("policies", "newest", "torn").out)
    assert shown["newest"]["package"] == "acme-kv 1.0"
    assert shown["newest"]["also takes"] == "slack=3"
    assert shown["torn"]["package"] == "broken-kv 1.0"
    assert "ModuleNotFoundError: No module named 'nowhere_at_all'" in shown["torn"]["error"]


@pytest.mark.parametrize(
    "more",
    [
        "    def num_recent(self, budget): raise RuntimeError('torn')",
        "    def num_recent(self, budget): raise SystemExit('torn')",
        "    @property\n    def window(self): raise RuntimeError('torn') if self.slack == 3 else 0",
        "    @property\n    def whole_blocks(self): raise OSError('torn')",
        "    source = 'torn'\n    def __getattribute__(self, name):\n"
        "        if name == 'source': raise OSError('torn')\n        return super().__getattribute__(name)",
        "    keeps_window = property(lambda self: [].torn)",
        "    odd: object = type('Odd', (), {'__repr__': lambda self: 1 / 0, 'torn': 1})()",
    ],
)
def test_a_policy_that_cannot_be_described_is_shown_with_its_error(
    vtoken: Vtoken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = GOOD.replace('"newest"', '"odd"') + more + "\n"
    install(tmp_path, monkeypatch, "odd-kv", {"odd": "odd_kv:Newest"}, {"odd_kv.py": text})
    ran = vtoken("policies", "odd", "torn")
    assert (ran.code, ran.err) == (0, "")
    shown = facts(ran.out)
    assert list(shown) == ["odd", "torn"]
    assert f"odd                 {shown['odd']['error']} (odd-kv 1.0)\n" in re.sub(" +\n", "\n", vtoken("policies").out)
    assert set(shown["odd"]) == {"package", "error"}
    assert "torn" in shown["odd"]["error"] or "ZeroDivisionError" in shown["odd"]["error"]
    records = {record["name"]: record for record in json.loads(vtoken("policies", "--json").out)}
    assert set(records["odd"]) == {"name", "package", "error"}
    assert records["odd"]["error"] == shown["odd"]["error"]


def test_halves_of_characters_are_shown_as_what_they_are(
    vtoken: Vtoken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = GOOD.replace('"newest"', '"odd"').replace('"the tests"', r'"half \ud800"')
    install(tmp_path, monkeypatch, "odd-kv", {"odd": "odd_kv:Newest"}, {"odd_kv.py": text})
    assert facts(vtoken("policies", "odd").out)["odd"]["source"] == "half ?"
    assert "half ? (odd-kv 1.0)" in vtoken("policies").out


def test_it_fits_80_columns_without_cutting_anything(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for names in ((), BUILT_IN):
        out = vtoken("policies", *names).out
        assert max(map(len, out.splitlines())) <= 80
        assert "…" not in out


def test_the_list_has_a_line_or_two_of_each(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = vtoken("policies").out.splitlines()
    assert [line.split()[0] for line in lines[:-2] if line[0] != " "] == [*BUILT_IN, "newest", "torn"]
    assert len(lines) <= 2 * len(BUILT_IN) + 6
    assert lines[-1] == "More of one: vtoken policies NAME"
    told = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines}
    assert told["knorm"] == "Drop the tokens with the longest keys."
    assert told["newest"] == "the tests (acme-kv 1.0)"  # it has no docstring but the one that dataclasses make
    assert "No module named 'nowhere_at_all' (broken-kv 1.0)" in " ".join(" ".join(lines).split())


def test_names_that_are_none(vtoken: Vtoken) -> None:
    for name, why in (("h20", "did you mean 'h2o'?"), ("AdaKV", "cannot be had: it keeps other tokens")):
        ran = vtoken("policies", "h2o", name)
        assert (ran.code, ran.out) == (2, "")
        assert why in ran.err


def test_some_of_them(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order they were asked for, each once."""
    monkeypatch.setenv("COLUMNS", "300")
    assert [each["name"] for each in json.loads(vtoken("policies", "torn", "h2o", "torn", "--json").out)] == [
        "torn",
        "h2o",
    ]
    assert list(facts(vtoken("policies", "torn", "h2o", "torn").out)) == ["torn", "h2o"]


def test_json_is_the_same_for_programs(vtoken: Vtoken) -> None:
    records = {record["name"]: record for record in json.loads(vtoken("policies", "--json").out)}
    assert list(records) == [*BUILT_IN, "newest", "torn"]
    assert records["rkv"]["needs"][0] == {"name": "SumLast(window=8)", "about": "attention of the last 8 queries"}
    assert records["rkv"]["parameters"]["weight"] == 0.07
    assert records["rkv"]["stride"] == 128
    assert records["lagkv"]["sinks"] == 4
    assert records["h2o"]["package"] is None
    assert records["newest"]["package"] == "acme-kv 1.0"
    assert set(records["torn"]) == {"name", "package", "error"}
