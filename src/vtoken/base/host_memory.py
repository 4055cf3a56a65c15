"""How much memory this process may still take from the host."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that can be had without swapping: the host's, or the container's where it has a tighter limit."""
    host = int(psutil.virtual_memory().available)
    container = _cgroup_available(_CGROUP)
    return host if container is None else min(host, container)


def _cgroup_available(root: Path) -> int | None:
    """Room below the cgroup v2 limit in bytes, or None where there is no limit to read."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    # Clean file pages count as used, yet the kernel drops them as soon as somebody needs the memory.
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
