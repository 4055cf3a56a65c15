"""Policies by name, by name and parameters, from packages, and as instances; and what is refused in which words."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.policies.distributions import install
from vtoken.base.errors import ConfigError
from vtoken.policies.base import Policy
from vtoken.policies.h2o import H2O
from vtoken.policies.random import Random
from vtoken.policies.registry import BUILT_IN, REFUSED, list_policies, resolve_policy
from vtoken.policies.rkv import RKV
from vtoken.policies.snapkv import SnapKV

GOOD = """
from dataclasses import dataclass
import numpy as np
from vtoken.policies.base import Policy

@dataclass(frozen=True)
class Newest(Policy):
    name = "newest"
    source = "the tests"
    slack: int = 3

    def score(self, view):
        return view.positions
"""


class Duck:
    """Scores like a policy, and is none."""

    def score(self, view: Any) -> Any:
        return view.positions

    def __repr__(self) -> str:
        return "Duck()"


def test_what_is_no_policy_is_said_without_the_field_in_front() -> None:
    """Who asks puts it there."""
    with pytest.raises(ConfigError, match=r"^expected a policy's name or a Policy as kv_policy, got Duck\(\)$"):
        resolve_policy(Duck())  # type: ignore[arg-type]


def test_a_name_gives_the_policy_with_its_defaults() -> None:
    assert resolve_policy("h2o") == H2O(recent=0.5)
    for name in BUILT_IN:
        assert resolve_policy(name).name == name


def test_parameters_follow_the_name() -> None:
    assert resolve_policy("h2o:recent=64") == H2O(recent=64)
    assert resolve_policy("h2o:recent=0.25,sinks=4, stride=none") == H2O(recent=0.25, sinks=4)
    assert resolve_policy(" snapkv : window=16,prefill_stride=NONE ") == SnapKV(window=16)
    assert resolve_policy("rkv:weight=1,threshold=-1e-1") == RKV(weight=1, threshold=-0.1)


def test_an_instance_is_taken_as_it_is() -> None:
    policy = Random(seed=5)
    assert resolve_policy(policy) is policy


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("h3o", r"unknown kv_policy 'h3o'; did you mean 'h2o'\? known: random, streaming_llm, h2o, "),
        ("R-KV", r"unknown kv_policy 'R-KV'; did you mean 'rkv'\? known: "),
        ("StreamingLLM", r"unknown kv_policy 'StreamingLLM'; did you mean 'streaming_llm'\? known: "),
        ("", "unknown kv_policy ''; known: "),
        ("h2o:recnt=3", r"kv_policy 'h2o': unknown parameter 'recnt'; did you mean 'recent'\? known: sinks, recent, "),
        ("knorm:name=3", "kv_policy 'knorm': unknown parameter 'name'; known: sinks, recent, stride, prefill_stride"),
        ("h2o:", "kv_policy 'h2o': expected parameter=value after ':' and ',', got ''"),
        ("h2o:recent", "expected parameter=value after ':' and ',', got 'recent'"),
        ("h2o:recent=", "expected parameter=value after ':' and ',', got 'recent='"),
        ("h2o:recent=1,", "expected parameter=value after ':' and ',', got ''"),
        ("h2o:recent=1,recent=2", "kv_policy 'h2o': recent is given twice"),
        ("h2o:recent=many", "h2o: recent: expected a whole number from 0 to 2147483647 or a share .* got 'many'"),
        ("h2o:recent=1.5", "or a share of the budget from 0 to 0.99, got 1.5"),
        ("h2o:recent=1.0", "or a share of the budget from 0 to 0.99, got 1.0"),
        ("h2o:recent=-3", "h2o: recent: .* got -3"),
        ("h2o:recent=nan", "h2o: recent: .* got nan"),
        ("h2o:recent=true", "h2o: recent: .* got True"),
        ("h2o:sinks=-1", "h2o: sinks: expected a whole number from 0 to 2147483647, got -1"),
        ("h2o:sinks=0.5", "h2o: sinks: .* got 0.5"),
        ("h2o:stride=0", "h2o: stride: expected a whole number from 1 to 2147483647 or none, got 0"),
        ("snapkv:window=0", "snapkv: window: expected a whole number from 1 to 2147483647, got 0"),
        ("snapkv:window=none", "snapkv: window: .* got None"),
        ("snapkv:kernel=4", "snapkv: kernel: expected an odd number from 1 to 1023, got 4"),
        ("rkv:weight=1.01", "rkv: weight: expected a number from 0 to 1, got 1.01"),
        ("rkv:threshold=inf", "rkv: threshold: expected a number, got inf"),
        (f"random:seed={10**400}", "random: seed: .* got a huge|random: seed: .* got 1000"),
        ("snapkv:stride=16", "snapkv: stride=16 is below the 32 queries it looks at before each decision"),
        ("scissorhands:window=600", "scissorhands: prefill_stride=512 is below the 600 queries"),
        ("rkv:window=200", "rkv: stride=128 is below the 200 queries"),
        (H2O, r"^got the class H2O as kv_policy; give an instance: H2O\(\)"),
        (7, "^expected a policy's name or a Policy as kv_policy, got 7"),
        (None, "^expected a policy's name or a Policy as kv_policy, got None"),
    ],
)
def test_a_mistake_is_named_and_what_was_expected(spec: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_policy(spec)


@pytest.mark.parametrize(
    "name", ["pyramidkv", "PyramidKV", "pyramid-kv", "adakv", "Ada_KV", "dms", "DuoAttention", "headkv"]
)
def test_what_needs_tables_for_heads_or_layers_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_policy '{name}' cannot be had: .*(head|layer)") as raised:
        resolve_policy(name)
    assert "one token table serves all heads and layers here" in str(raised.value)


def test_nothing_is_both_offered_and_refused() -> None:
    assert not {name.replace("_", "") for name in BUILT_IN} & set(REFUSED)


def test_naming_a_policy_imports_no_other() -> None:
    script = (
        "import sys; from vtoken.policies.registry import resolve_policy; resolve_policy('h2o'); "
        "print(sorted(m for m in sys.modules if m.startswith('vtoken.policies.')), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "vtoken.policies.h2o" in out
    assert "vtoken.policies.rkv" not in out
    assert out.endswith("False\n")


# --- policies of other packages ---------------------------------------------------------------------------------------


def test_a_policy_of_a_package_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "acme-kv", {"newest": "acme_kv:Newest"}, {"acme_kv.py": GOOD}, version="2.3")
    policy = resolve_policy("newest:slack=5")
    assert policy == importlib.import_module("acme_kv").Newest(slack=5)
    (entry,) = [entry for entry in list_policies() if entry.name == "newest"]
    assert (entry.package, entry.error, entry.own_parameters) == ("acme-kv 2.3", None, {"slack": 3})
    with pytest.raises(ConfigError, match="newest: slack: expected a whole number, got 'x'"):
        resolve_policy("newest:slack=x")
    with pytest.raises(ConfigError, match=r"unknown kv_policy 'newst'; did you mean 'newest'\? known: .*newest"):
        resolve_policy("newst")


BROKEN = [
    ("import nowhere_to_be_found", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
    ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
    (
        "import asyncio; raise asyncio.CancelledError('no more')",
        "of broken-kv 1.0 cannot be loaded: CancelledError: no more",
    ),
    ("raise GeneratorExit", "of broken-kv 1.0 cannot be loaded: GeneratorExit"),
    ("this is no Python", "cannot be loaded: SyntaxError"),
    ("Other = 1", "cannot be loaded: AttributeError"),
    ("Newest = dict", "is no Policy: broken_kv:Newest is <class 'dict'>"),
    (GOOD.replace('"newest"', '"oldest"'), "calls itself 'oldest'; both names must agree"),
    (GOOD.replace('    name = "newest"\n', ""), "calls itself None; both names must agree"),
    (GOOD.replace('    source = "the tests"\n', ""), "policy Newest: give the class a source, a text"),
    (GOOD.replace("@dataclass(frozen=True)\n", ""), r"policy Newest: write @dataclass\(frozen=True\) above the class"),
    (GOOD.replace("(frozen=True)", ""), "cannot be loaded: TypeError: cannot inherit non-frozen dataclass"),
    (GOOD + "    def __post_init__(self): raise SystemExit('bye')\n", "'newest' cannot be made: SystemExit: bye"),
    (
        GOOD + "    def __post_init__(self): pass\n    needs = property(lambda self: 1 / 0)\n",
        "'newest' cannot be checked: ZeroDivisionError",
    ),
    (GOOD.replace("def score", "def skore"), "cannot be made: TypeError: Can't instantiate abstract class Newest"),
    (GOOD.replace("slack: int = 3", "slack: int = -0.5"), "newest: slack: expected a whole number, got -0.5"),
    (GOOD.replace("slack: int = 3", "sinks: int = -3"), "newest: sinks: expected a whole number from 0"),
    (GOOD.replace("slack: int = 3", "needs = ('Sum',)"), r"newest: needs: expected a tuple of statistics \(Sum, "),
    (GOOD.replace("slack: int = 3", "slack: 'Nowhere' = 3"), "the annotations of Newest cannot be read: NameError"),
]


@pytest.mark.parametrize(("text", "said"), BROKEN)
def test_a_broken_package_is_named_and_breaks_no_other(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "broken-kv", {"newest": "broken_kv:Newest"}, {"broken_kv.py": text})
    install(
        tmp_path, monkeypatch, "zeta-kv", {"zeta": "zeta_kv:Newest"}, {"zeta_kv.py": GOOD.replace('"newest"', '"zeta"')}
    )
    with pytest.raises(ConfigError, match=said):
        resolve_policy("newest")
    entries = {entry.name: entry for entry in list_policies()}
    assert list(entries) == [*BUILT_IN, "newest", "zeta"]
    assert entries["newest"].policy is None
    assert entries["newest"].package == "broken-kv 1.0"
    assert entries["newest"].error
    assert entries["zeta"].error is None
    assert resolve_policy("zeta").name == "zeta"
    assert resolve_policy("h2o") == H2O()


def test_ctrl_c_while_a_policy_is_imported_is_no_fault_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "slow-kv", {"newest": "slow_kv:Newest"}, {"slow_kv.py": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        list_policies()


@pytest.mark.parametrize(
    "text",
    [
        b"[vtoken.policies]\nthis line says nothing\n",
        b"[console_scripts]\ngarbage\n[vtoken.policies]\ntorn = torn_kv:Torn\n",
        b"[vtoken.policies]\ntorn = \xff\n",
    ],
)
def test_a_list_of_entry_points_that_cannot_be_read_hides_no_other(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "torn-kv", {"torn": "torn_kv:Torn"}, {})
    (tmp_path / "torn_kv-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    install(tmp_path, monkeypatch, "acme-kv", {"newest": "acme_kv:Newest"}, {"acme_kv.py": GOOD})
    assert resolve_policy("newest").name == "newest"
    entries = {entry.package: entry for entry in list_policies() if entry.package}
    assert entries["acme-kv 1.0"].error is None
    assert entries["torn-kv 1.0"].policy is None
    assert (entries["torn-kv 1.0"].error or "").startswith("its entry_points.txt cannot be read: ")
    with pytest.raises(ConfigError, match="unknown kv_policy 'torn'; .*; torn-kv 1.0: its entry_points.txt cannot be"):
        resolve_policy("torn")


def test_garbage_in_a_package_that_offers_no_policy_is_not_ours_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "other", {}, {})
    (tmp_path / "other-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\ngarbage\n")
    assert [entry.name for entry in list_policies()] == list(BUILT_IN)


def test_lines_that_name_no_object_are_said_of_their_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "torn-kv", {"torn": "", "worn": "no such thing!", "born": "torn_kv:a.b.c"}, {})
    entries = {entry.name: entry for entry in list_policies() if entry.package}
    assert list(entries) == ["born", "torn", "worn"]
    assert all("cannot be loaded" in (entry.error or "") for entry in entries.values())


def test_a_package_cannot_take_a_name_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "greedy-kv", {"h2o": "greedy_kv:Newest"}, {"greedy_kv.py": GOOD})
    assert resolve_policy("h2o") == H2O()
    (entry,) = [entry for entry in list_policies() if entry.package]
    assert (entry.name, entry.error) == ("h2o", "the name is taken by a policy of vtoken")


def test_two_packages_with_one_name_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("one-kv", "two-kv"):
        module = package.replace("-", "_")
        install(tmp_path, monkeypatch, package, {"newest": f"{module}:Newest"}, {f"{module}.py": GOOD})
    with pytest.raises(
        ConfigError, match="'newest' is offered more than once: one-kv 1.0, two-kv 1.0; remove all but one"
    ):
        resolve_policy("newest")


def test_a_parameter_without_a_default_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GOOD.replace("(frozen=True)", "(frozen=True, kw_only=True)").replace("slack: int = 3", "slack: int")
    install(tmp_path, monkeypatch, "acme-kv", {"newest": "acme_kv:Newest"}, {"acme_kv.py": text})
    with pytest.raises(ConfigError, match="kv_policy 'newest': needs slack=..."):
        resolve_policy("newest")
    assert isinstance(resolve_policy("newest:slack=1"), Policy)
