from __future__ import annotations

import pytest

from vtoken import CheckpointError, ConfigError
from vtoken.base.registry import Registry


@pytest.fixture
def backends() -> Registry[type]:
    registry: Registry[type] = Registry("attention backend")
    registry.register("reference")(int)
    registry.register("cpu")(float)
    return registry


def test_what_was_entered_is_found(backends: Registry[type]) -> None:
    assert backends["reference"] is int
    assert list(backends) == ["reference", "cpu"]
    assert "cpu" in backends
    assert "gpu" not in backends


def test_an_unknown_name_is_answered_with_the_known_ones(backends: Registry[type]) -> None:
    expected = r"unknown attention backend 'refernce'; did you mean 'reference'\? known: cpu, reference"
    with pytest.raises(ConfigError, match=expected):
        backends["refernce"]


def test_the_owner_chooses_the_error() -> None:
    with pytest.raises(CheckpointError, match="unknown architecture"):
        Registry[type]("architecture", CheckpointError)["Foo"]


def test_a_name_is_taken_once(backends: Registry[type]) -> None:
    with pytest.raises(AssertionError, match="twice"):
        backends.register("cpu")(int)
