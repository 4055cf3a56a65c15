"""The host, as a report tells it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

from vtoken.base.host_memory import available_bytes
from vtoken.base.units import format_bytes


def machine() -> dict[str, str]:
    """What the host times depend on."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        "memory available": format_bytes(available_bytes()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
