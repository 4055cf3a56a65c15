"""What installed packages offer under an entry point group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TypeVar

from vtoken.base.errors import VtokenError, describe
from vtoken.base.validation import shorten

T = TypeVar("T")


def find_entry_points(group: str) -> tuple[list[metadata.EntryPoint], dict[str, str]]:
    """What packages offer, and those whose list of it cannot be read: package -> why."""
    try:
        return list(metadata.entry_points(group=group)), {}
    except Exception:  # one package's file hides all the others: look at each by itself
        found: dict[str, list[metadata.EntryPoint]] = {}
        unreadable: dict[str, str] = {}
        for package in metadata.distributions():
            name = _name(package)
            try:
                found.setdefault(name, list(package.entry_points.select(group=group)))
            except Exception as error:
                if _may_offer(package, group):
                    unreadable[name] = f"its entry_points.txt cannot be read: {describe(error)}"
        return [point for points in found.values() for point in points], unreadable


def package_of(point: metadata.EntryPoint) -> str:
    """Name and version of the package that offers it."""
    return point.value if point.dist is None else _name(point.dist)


def load_class(
    points: Sequence[metadata.EntryPoint], kind: type[T], owner: str, error: Callable[[str], VtokenError]
) -> type[T]:
    """Import the `kind` that packages offer under one name. Raises `error`, about the `owner` of the name, if more than
    one does (there is at least one), if it cannot be imported, and if it is something else."""
    packages = sorted({package_of(point) for point in points})
    if len(points) > 1:
        raise error(f"{owner} is offered more than once: {', '.join(packages)}; remove all but one")
    try:
        found = points[0].load()
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # whatever importing it does
        raise error(f"{owner} of {packages[0]} cannot be loaded: {describe(failure)}") from failure
    if not (inspect.isclass(found) and issubclass(found, kind)):
        raise error(f"{owner} of {packages[0]} is no {kind.__name__}: {points[0].value} is {shorten(found)}")
    return found


def _may_offer(package: metadata.Distribution, group: str) -> bool:
    try:
        return group in (package.read_text("entry_points.txt") or "")
    except Exception:
        return True


def _name(package: metadata.Distribution) -> str:
    try:
        return f"{package.name} {package.version}"
    except Exception:
        return f"a package without a name in {package.locate_file('')}"
