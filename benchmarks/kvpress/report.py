"""From what both sides found to a table on a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import pages
from benchmarks.kvpress.pairs import PAIRS

BEGIN: Final = "<!-- kvpress:begin -->"
END: Final = "<!-- kvpress:end -->"
FULL: Final = "full cache"

Summary = Mapping[str, float]  # as `cases.summary` makes it


@dataclass(frozen=True)
class Line:
    """One press and policy at one number of kept tokens, or the full cache on both sides."""

    press: str
    policy: str
    kept: int
    theirs: Summary
    ours: Summary


def page(lines: Sequence[Line], about: Mapping[str, Any]) -> str:
    """Markdown: what was run, and the table."""
    full = next(line for line in lines if line.press == FULL)
    gap = abs(full.theirs["perplexity"] - full.ours["perplexity"])
    text = (
        f"`python -m benchmarks.kvpress`, {about['date']}: {about['model']} in float32 under {about['kvpress']} and "
        f"here. {about['windows']} contexts of {about['context']:,} tokens of {about['text']} are read, cut down once "
        f"to the same number of tokens, and the next {about['continuation']} tokens are forced and scored; "
        f"{about['needles']} numbers are hidden in as many contexts and asked for after the cut. kvpress keeps other "
        "tokens in each KV head and layer, here all keep the same ones: that is what the difference is of, parameters "
        "are alike (`benchmarks/kvpress/README.md`). With the full cache the two sides differ by "
        f"{gap:.1g} nats a token."
    )
    headings = [
        "kept",
        "press",
        "perplexity",
        "needles",
        "nats a token",
        "policy",
        "perplexity",
        "needles",
        "nats a token",
    ]
    rows = [headings, ["---", "---", "---:", "---:", "---:", "---", "---:", "---:", "---:"]]
    order = [FULL, *(pair.press for pair in PAIRS)]
    for line in sorted(lines, key=lambda line: (-line.kept, order.index(line.press))):
        rows.append([f"{line.kept:,}", line.press, *_cells(line.theirs), line.policy, *_cells(line.ours)])
    return text + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(found: Summary) -> list[str]:
    return [f"{math.exp(-found['perplexity']):.2f}", f"{found['found']:.0%}", f"{found['needle']:.2f}"]


def write_between_markers(path: Path, text: str) -> None:
    """As `pages.write_between_markers`, with this table's markers."""
    pages.write_between_markers(path, text, BEGIN, END)
