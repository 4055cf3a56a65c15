"""The host's memory: how much this process may still take, and in what pages."""

from __future__ import annotations

import ctypes
import mmap
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


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask the system for large pages in this range. Advice only: where there are none, nothing changes (Linux)."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and begin < end:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(advice))
