"""Tables that benchmarks write into pages."""

from __future__ import annotations

from pathlib import Path


def write_between_markers(path: Path, text: str, begin: str, end: str) -> None:
    """Put the text between two markers of a page; a page without them gets them at its end. Raises ValueError if only
    one is there, or they are in the wrong order."""
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    first, last = old.find(begin), old.find(end)
    if first < 0 and last < 0:
        new = f"{old.rstrip()}\n\n{begin}\n{text}\n{end}\n".lstrip()
    elif 0 <= first < last:
        new = f"{old[: first + len(begin)]}\n{text}\n{old[last:]}"
    else:
        raise ValueError(f"{path} needs both {begin} and {end}, in this order, or neither")
    path.write_text(new, encoding="utf-8")
