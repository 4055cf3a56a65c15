"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

import psutil

# Instruction sets that decide which kernels an engine may take.
FLAGS_OF_NOTE: Final = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
)


def num_threads() -> int:
    """Cores this process may use: what every engine gets."""
    return len(os.sched_getaffinity(0))


def cpu_info(text: str | None = None) -> tuple[str, str, list[str]]:
    """(vendor, model name, flags of note) from /proc/cpuinfo, or from such a text."""
    if text is None:
        path = Path("/proc/cpuinfo")
        text = path.read_text() if path.is_file() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = set(fields.get("flags", "").split())
    model = fields.get("model name", platform.processor() or "unknown")
    family = f", family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else ""
    return fields.get("vendor_id", "unknown"), model + family, [flag for flag in FLAGS_OF_NOTE if flag in flags]


def is_zen_with_avx512() -> bool:
    """Whether AMD's kernels for torch run here."""
    vendor, _, flags = cpu_info()
    return vendor == "AuthenticAMD" and "avx512f" in flags


def facts() -> dict[str, Any]:
    """CPU, memory and software, as recorded beside the figures."""
    vendor, model, flags = cpu_info()
    return {
        "cpu": model,
        "vendor": vendor,
        "cores": num_threads(),
        "flags": flags,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
