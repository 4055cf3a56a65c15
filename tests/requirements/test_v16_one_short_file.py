"""V16: a policy is one file under 50 lines, docstring and imports included, and touches no other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vtoken.policies.base import Policy
from vtoken.policies.registry import BUILT_IN, policy_class

FOLDER = Path(__file__).parents[2] / "src" / "vtoken" / "policies"
# What a policy may know: numbers, its own parameters, and the contract. No pool, no table, no allocator, no scheduler.
KNOWN = {
    "__future__",
    "dataclasses",
    "typing",
    "numpy",
    "numpy.typing",
    "vtoken.base.hashing",
    "vtoken.policies.arithmetic",
    "vtoken.policies.base",
    "vtoken.policies.parameters",
    "vtoken.policies.statistics",
}
SHARED = {"__init__", "arithmetic", "base", "parameters", "registry", "statistics", "victims"}


def test_every_file_is_a_policy_or_shared_by_all() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(BUILT_IN) | SHARED


@pytest.mark.parametrize("name", BUILT_IN)
def test_v16_a_policy_is_one_file_under_50_lines(name: str) -> None:
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith('"""')
    assert len(lines) < 50


@pytest.mark.parametrize("name", BUILT_IN)
def test_v16_a_policy_knows_no_other_module(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    imported: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported <= KNOWN


@pytest.mark.parametrize("name", BUILT_IN)
def test_v16_a_policy_is_needs_and_score_and_nothing_else(name: str) -> None:
    of = policy_class(name)
    own = {key for key, value in vars(of).items() if not key.startswith("_") and key not in of.__dataclass_fields__}
    assert own <= {"name", "source", "needs", "score", "whole_blocks", "keeps_window"}
    assert of.__bases__ == (Policy,)
