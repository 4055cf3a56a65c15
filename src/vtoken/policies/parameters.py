"""Parameters: fields of frozen dataclasses, whose annotations say which values they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from vtoken.base.errors import ConfigError, describe
from vtoken.base.registry import suggest
from vtoken.base.validation import shorten


@dataclass(frozen=True)
class Limit:
    """What an annotation says beyond the type; `expected` is worded to follow "expected"."""

    expected: str
    holds: Callable[[Any], bool]


_MOST = 2**31 - 1  # lengths and positions travel as int32

Whole = Annotated[int, Limit(f"a whole number from 0 to {_MOST}", lambda n: 0 <= n <= _MOST)]
Count = Annotated[int, Limit(f"a whole number from 1 to {_MOST}", lambda n: 1 <= n <= _MOST)]
Odd = Annotated[int, Limit("an odd number from 1 to 1023", lambda n: 1 <= n <= 1023 and n % 2 == 1)]
Share = Annotated[float, Limit("a number from 0 to 1", lambda x: 0 <= x <= 1)]
# A budget full of recent tokens would leave no victim.
Recent = Whole | Annotated[float, Limit("a share of the budget from 0 to 0.99", lambda x: 0 <= x <= 0.99)]

_PLAIN: Final = {
    NoneType: "none",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
}


def check_fields(instance: Any, of: type, owner: str) -> None:
    """Raise ConfigError for the first field of the dataclass `of` whose value in `instance` is not what its annotation
    asks for.

    Numbers are finite, and no bool is one. Annotations other than None, bool, int, float, str, literals, their unions
    and `Limit`s are not looked at. `owner` is what messages call the instance.
    """
    hints = _hints(of)
    for field in fields(of):
        value = getattr(instance, field.name)
        if not _fits(value, hints[field.name]):
            expected = " or ".join(_expected(hints[field.name]))
            raise ConfigError(f"{owner}: {field.name}: expected {expected}, got {shorten(value)}")


def unify_numbers(instance: Any, of: type) -> None:
    """Give numbers in the fields of the dataclass `of` the type of their annotation, so that equal ones look alike: 1
    and 1.0, 0.0 and -0.0. They were checked before; where an annotation takes both types each stays what it is."""
    hints = _hints(of)
    for field in fields(of):
        value, types = getattr(instance, field.name), _types(hints[field.name])
        if isinstance(value, bool) or not isinstance(value, int | float) or not types & {int, float}:
            continue
        is_float = isinstance(value, float) or int not in types
        object.__setattr__(instance, field.name, float(value) + 0.0 if is_float else int(value))


def read_parameters(of: type, text: str, owner: str) -> dict[str, Any]:
    """Read `"parameter=value,parameter=value"` for a dataclass. Values are numbers, true, false, none, or else words.

    Raises ConfigError for what is no such list, and for a parameter that `of` does not have. Values are for the
    instance to check.
    """
    known = [field.name for field in fields(of) if field.init]
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, is_given, value = (each.strip() for each in part.partition("="))
        if not (name and is_given and value):
            raise ConfigError(f"{owner}: expected parameter=value after ':' and ',', got {shorten(part)}")
        if name not in known:
            raise ConfigError(f"{owner}: unknown parameter {name!r}; {suggest(name, known)}known: {', '.join(known)}")
        if name in found:
            raise ConfigError(f"{owner}: {name} is given twice")
        found[name] = _read(value)
    return found


def defaults_of(of: type) -> Mapping[str, Any]:
    """Parameters of a dataclass with their defaults; MISSING where there is none."""
    return {field.name: _default(field) for field in fields(of) if field.init}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _read(text: str) -> bool | int | float | str | None:
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


@cache
def _hints(of: type) -> dict[str, Any]:
    try:
        return get_type_hints(of, include_extras=True)
    except Exception as error:  # evaluating an annotation may raise anything
        raise ConfigError(f"the annotations of {of.__qualname__} cannot be read: {describe(error)}") from error


def _branches(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _types(hint: Any) -> set[Any]:
    """The types that a hint takes, limits aside."""
    if get_origin(hint) is Annotated:
        return _types(get_args(hint)[0])
    branches = _branches(hint)
    return {hint} if branches == (hint,) else set().union(*map(_types, branches))


def _fits(value: Any, hint: Any) -> bool:
    return any(_fits_branch(value, branch) for branch in _branches(hint))


def _fits_branch(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        plain, *extras = get_args(hint)
        limits = [extra for extra in extras if isinstance(extra, Limit)]
        return _fits(value, plain) and all(limit.holds(value) for limit in limits)
    if get_origin(hint) is Literal:
        return any(isinstance(value, type(each)) and value == each for each in get_args(hint))
    if hint not in _PLAIN:
        return True
    if isinstance(value, bool) or hint not in (int, float):
        return isinstance(value, bool) == (hint is bool) and isinstance(value, hint)
    return isinstance(value, int) if hint is int else isinstance(value, int | float) and _is_finite(value)


def _is_finite(number: int | float) -> bool:
    try:
        return isfinite(number)
    except OverflowError:  # a whole number that no float holds
        return False


def _expected(hint: Any) -> list[str]:
    """Descriptions of all that a hint takes."""
    found = []
    for branch in _branches(hint):
        if get_origin(branch) is Annotated:
            plain, *extras = get_args(branch)
            found += [each.expected for each in extras if isinstance(each, Limit)] or _expected(plain)
        elif get_origin(branch) is Literal:
            found.append(" or ".join(map(repr, get_args(branch))))
        else:
            found.append(_PLAIN.get(branch, str(branch)))
    return found
