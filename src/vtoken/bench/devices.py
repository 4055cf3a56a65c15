"""Accelerators as the roofline sees them: one row a device, from its data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vtoken.base.errors import ConfigError
from vtoken.base.registry import suggest


@dataclass(frozen=True)
class Device:
    """Peak figures; `Roofline` says which share of them is taken to be reached."""

    flops_per_second: float  # dense bfloat16 with float32 sums
    bytes_per_second: float  # of its memory
    memory_bytes: int
    link_bytes_per_second: float  # to the host, one way


DEVICES: Final = {
    "h100": Device(989e12, 3.35e12, 80 * 10**9, 63e9),  # SXM5, HBM3, PCIe 5.0 x16
    "h200": Device(989e12, 4.8e12, 141 * 10**9, 63e9),
    "a100": Device(312e12, 2.039e12, 80 * 10**9, 31.5e9),  # SXM4 80 GB, PCIe 4.0 x16
    "l40s": Device(362e12, 864e9, 48 * 10**9, 31.5e9),
    "l4": Device(121e12, 300e9, 24 * 10**9, 31.5e9),
    "rtx4090": Device(165e12, 1008e9, 24 * 10**9, 31.5e9),
}


def find_device(name: str) -> Device:
    """Raises ConfigError for an unknown name."""
    if name not in DEVICES:
        raise ConfigError(f"device: unknown {name!r}; {suggest(name, list(DEVICES))}known: {', '.join(DEVICES)}")
    return DEVICES[name]
