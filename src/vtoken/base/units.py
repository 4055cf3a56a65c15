"""Byte sizes as people write and read them."""

from __future__ import annotations

import re

from vtoken.base.validation import shorten

_FACTORS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _FACTORS[f"{_prefix}b"] = 1000**_power
    _FACTORS[f"{_prefix}ib"] = 1024**_power

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: str) -> int:
    """Bytes in `"512MiB"`, `"1.5 GB"` or `"4096"`. MiB counts in 1024s, MB in 1000s; letter case does not matter.

    Raises ValueError for anything else, part of a byte included.
    """
    match = _SIZE.fullmatch(size)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{shorten(size)} is no size; write bytes or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    whole, _, decimals = match[1].partition(".")
    # Exact integer arithmetic: a float would lose bytes from 2**53 on.
    scale: int = 10 ** len(decimals)
    num_bytes, rest = divmod(int(whole + decimals) * factor, scale)
    if rest:
        raise ValueError(f"{shorten(size)} is not a whole number of bytes")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """`"512 MiB"`, `"1.5 GiB"`, `"900 B"`: at most three significant decimals, binary units."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        value /= 1024
    return f"{value:,.2f}".rstrip("0").rstrip(".") + " TiB"
