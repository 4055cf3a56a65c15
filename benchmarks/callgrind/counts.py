"""Reads callgrind's dumps and does the arithmetic of the comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NOTHING: Final = "nothing"  # two dumps with nothing between them: what a dump itself counts
PARTS: Final = ("schedule", "execute", "apply")

_TRIGGER: Final = "desc: Trigger: Client Request: "


def instructions(dumps: Iterable[Path], steps: int) -> dict[str, float]:
    """Instructions a step of each part, what the dumps themselves take subtracted.

    Raises ValueError where a part was not dumped once a step.
    """
    totals: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for path in dumps:
        name, total = read_dump(path.read_text())
        if name is not None:
            totals[name] += total
            times[name] += 1
    expected = {NOTHING: 1} | dict.fromkeys(PARTS, steps)
    found = {name: times[name] for name in expected}
    if found != expected:
        raise ValueError(f"dumps of {found}, expected {expected}")
    return {part: totals[part] / steps - totals[NOTHING] for part in PARTS}


def read_dump(text: str) -> tuple[str | None, int]:
    """(name given in the client request or None, instructions counted) of one dump."""
    name, total = None, None
    for line in text.splitlines():
        if line.startswith(_TRIGGER):
            name = line.removeprefix(_TRIGGER).strip()
        elif line.startswith(("totals:", "summary:")):
            total = int(line.partition(":")[2].split()[0])
    if total is None:
        raise ValueError("a dump without a total: callgrind was stopped while it wrote")
    return name, total


@dataclass(frozen=True)
class Cost:
    """Instructions of one decode step that the token-level machinery adds, against the step without it."""

    books: float  # schedule and apply
    kernels: float  # execute: reading masks instead of counting on
    step: float  # the whole step without the machinery
    finding: float  # all that finding live cells takes, what a cache of blocks alone would spend included

    @property
    def added(self) -> float:
        return self.books + self.kernels

    @property
    def share(self) -> float:
        """Of the step without the machinery."""
        return self.added / self.step

    @property
    def bound(self) -> float:
        """The share if all of finding live cells were due to the machinery."""
        return (self.books + max(self.kernels, self.finding)) / self.step


def cost(
    whole: Mapping[str, float], full: Mapping[str, float], plain: Mapping[str, float], twice: Mapping[str, float]
) -> Cost:
    """From the instructions by part of the whole step, and of the three variants (see `variants.PASTS`) without their
    matrix products, which are the same in all of them."""
    products = whole["execute"] - full["execute"]
    return Cost(
        books=sum(full[part] - plain[part] for part in ("schedule", "apply")),
        kernels=full["execute"] - plain["execute"],
        step=sum(plain.values()) + products,
        finding=twice["execute"] - full["execute"],
    )
