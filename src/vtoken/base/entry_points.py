"""What installed packages offer under an entry point group."""

from __future__ import annotations

from importlib import metadata

from vtoken.base.errors import describe


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
