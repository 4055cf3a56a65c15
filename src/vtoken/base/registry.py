"""`Registry`: from a name the user types to the thing it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from vtoken.base.errors import ConfigError, VtokenError

T = TypeVar("T")


def suggest(name: str, known: list[str]) -> str:
    """`"did you mean 'b'? "` for the nearest known name, or an empty string; made to stand before a list of choices."""
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}? " if close else ""


class Registry(Mapping[str, T]):
    """A named set of things of one kind.

    >>> backends: Registry[type] = Registry("attention backend")
    >>> @backends.register("reference")
    ... class Reference: ...
    >>> backends["refernce"]
    Traceback (most recent call last):
    vtoken.base.errors.ConfigError: unknown attention backend 'refernce'; did you mean 'reference'? known: reference
    """

    def __init__(self, kind: str, error: Callable[[str], VtokenError] = ConfigError) -> None:
        self._kind = kind
        self._error = error
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters what it decorates under `name`. One name, one thing."""

        def enter(item: T) -> T:
            assert name not in self._items, f"{self._kind} {name!r} is registered twice"
            self._items[name] = item
            return item

        return enter

    def __getitem__(self, name: str) -> T:
        """Raises the registry's error, in the user's words, for an unknown name."""
        if name not in self._items:
            known = sorted(self._items)
            raise self._error(f"unknown {self._kind} {name!r}; {suggest(name, known)}known: {', '.join(known)}")
        return self._items[name]

    # `Mapping.__contains__` would ask `__getitem__` for a KeyError, which it never raises.
    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
