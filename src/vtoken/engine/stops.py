"""Texts that end an answer, found in whatever tokens they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def find_stop(text: str, begin: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """(where it begins, which) of the first stop text that ends behind `begin`, of two that begin there the longer;
    None if there is none. What ends before was looked at when the text was shorter."""
    found = [(at, stop) for stop in stops if (at := text.find(stop, max(0, begin - len(stop) + 1))) >= 0]
    return min(found, key=lambda each: (each[0], -len(each[1])), default=None)


def without_beginning_of(stops: Iterable[str], text: str) -> str:
    """`text` without the longest end of it that may be the beginning of a stop text: shown once that is decided."""
    held = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:length]):
                held = length
                break
    return text[: len(text) - held]
