from __future__ import annotations

from pathlib import Path

import pytest

from vtoken.base import host_memory

GIB = 1024**3


def _cgroup(root: Path, limit: str, used: int, inactive_file: int) -> Path:
    (root / "memory.max").write_text(limit + "\n")
    (root / "memory.current").write_text(f"{used}\n")
    (root / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n")
    return root


def test_a_container_limit_below_the_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 GiB limit, 0.75 used, of which 0.25 is cache that the kernel would drop.
    root = _cgroup(tmp_path, str(GIB), 3 * GIB // 4, GIB // 4)
    monkeypatch.setattr(host_memory, "_CGROUP", root)
    assert host_memory.available_bytes() == GIB // 2


def test_no_limit_and_no_cgroup_leave_the_hosts_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 7 * GIB}))
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path / "absent")
    assert host_memory.available_bytes() == 7 * GIB
    monkeypatch.setattr(host_memory, "_CGROUP", _cgroup(tmp_path, "max", GIB, 0))
    assert host_memory.available_bytes() == 7 * GIB


def test_a_full_container_has_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", _cgroup(tmp_path, str(GIB), 2 * GIB, 0))
    assert host_memory.available_bytes() == 0
