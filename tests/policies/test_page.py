"""docs/add-a-policy.md does what it says: its blocks are run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from tests.policies.distributions import install
from tests.tiny_models import save_llama
from vtoken.base.config import EngineConfig
from vtoken.policies.base import Policy
from vtoken.policies.registry import GROUP, resolve_policy
from vtoken.policies.statistics import STATISTICS

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-policy.md").read_text(encoding="utf-8")
POLICY, TRIAL, USE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

Install = Callable[..., None]


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's file, in a package that registers it as the page says."""
    points = tomllib.loads(PROJECT)["project"]["entry-points"][GROUP]
    install(tmp_path, monkeypatch, "mean-attention", points, {"mean_attention.py": POLICY})


def test_the_policy_is_short() -> None:
    assert len(POLICY.splitlines()) < 50


@pytest.mark.usefixtures("installed")
def test_the_trial_without_a_model_runs() -> None:
    exec(compile(TRIAL, "add-a-policy.md", "exec"), {})


@pytest.mark.usefixtures("installed")
def test_its_name_works_with_parameters_as_the_page_shows_them() -> None:
    (spec,) = re.findall(r"--kv-policy (mean_attention:\S+?)`", PAGE)
    policy = resolve_policy(spec)
    assert (policy.name, policy.recent, getattr(policy, "power", None)) == ("mean_attention", 16, 0.5)


@pytest.mark.usefixtures("installed")
def test_an_instance_runs_in_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "kv_policy" not in EngineConfig.names():
        pytest.skip("the engine takes no policies yet")
    model = save_llama(tmp_path / "model", tokenizer=True)
    exec(compile(USE.replace("smollm2-135m", str(model)), "add-a-policy.md", "exec"), {})
    kept, evicted = map(int, re.findall(r"\d+", capsys.readouterr().out))
    assert evicted > 0
    assert kept + evicted >= 128


def test_every_statistic_is_on_the_page() -> None:
    shown = re.findall(r"`(\w+)\(", " ".join(row[0] for row in table("statistic")))
    assert set(shown) == {each.__name__ for each in STATISTICS}


def test_the_fields_on_the_page_have_those_defaults() -> None:
    shown = {row[0].strip("`"): row[1].strip("`") for row in table("field")}
    assert shown == {field.name: str(field.default) for field in fields(Policy)}
