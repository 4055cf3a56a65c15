from __future__ import annotations

import json
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
        name, _, _ = line.partition(" ")
        if name:
            found[name] = {}
        kind, _, text = line[20:].partition("  ")
        found[list(found)[-1]][kind] = text.strip()
    return found


def test_every_policy_is_shown_with_what_it_reads_and_protects(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    ran = vtoken("policies")
    assert (ran.code, ran.err) == (0, "")
    shown = facts(ran.out)
    assert list(shown) == [*BUILT_IN, "newest", "torn"]
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
    shown = facts(vtoken("policies").out)
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
    ran = vtoken("policies")
    assert (ran.code, ran.err) == (0, "")
    shown = facts(ran.out)
    assert list(shown) == [*BUILT_IN, "newest", "odd", "torn"]
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
    assert facts(vtoken("policies").out)["odd"]["source"] == "half ?"


def test_it_fits_80_columns_without_cutting_anything(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = vtoken("policies").out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


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
