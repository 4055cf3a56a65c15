"""Installed packages that offer policies or models: what pip would leave behind, in a folder of the test's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from vtoken.policies import registry


def install(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    entry_points: Mapping[str, str],
    files: Mapping[str, str],
    version: str = "1.0",
    group: str = registry.GROUP,
) -> None:
    """Put a distribution where Python finds it, until the test ends.

    `entry_points` are policies by name, as in a `pyproject.toml`, or what another `group` has; `files` are modules by
    file name.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [f"[{group}]", *(f"{key} = {value}" for key, value in entry_points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for file, text in files.items():
        (site / file).write_text(text, encoding="utf-8")
        # Another test may have a module of this name.
        monkeypatch.delitem(sys.modules, file.removesuffix(".py"), raising=False)
    if str(site) not in sys.path:
        monkeypatch.syspath_prepend(site)
    registry._third_party.cache_clear()
