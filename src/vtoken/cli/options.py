"""Command-line options made from `Settings`: one home for a setting's name, help, type and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from vtoken.base.units import parse_bytes
from vtoken.base.validation import Settings


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _length(text: str) -> int | str:
    if text.isdigit():
        return int(text)
    if text != "auto":
        raise typer.BadParameter(f"{text!r} is neither a whole number nor 'auto'")
    return text


# Settings that read more than their type says: how, and what `--help` calls the value.
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "kv_memory": (_size, "SIZE"),
    "swap_space": (_size, "SIZE"),
    "max_model_len": (_length, "TOKENS|auto"),
}


def takes(
    settings: type[Settings], into: str, panel: str, leave_out: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: give a command an option for each field of `settings`.

    The command gets what the user set, a dict by field name, as its keyword argument `into`; what is left to the
    default is not in it, `defaults` aside, which replace the settings' own.
    """
    names = [name for name in settings.names() if name not in leave_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in names}
            given = defaults | {name: value for name, value in given.items() if value is not None}
            command(**arguments, **{into: given})

        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != into]
        options = [_option(settings, name, panel, defaults.get(name)) for name in names]
        # Typer reads both; `run` itself takes anything.
        run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
        return run

    return decorate


def _option(settings: type[Settings], name: str, panel: str, default: Any) -> inspect.Parameter:
    field = settings.model_fields[name]
    default = field.default if default is None else default
    about = field.description or ""
    if default not in (None, ()):
        about += f" (default: {_spell(default)})"
    flag = "--" + name.replace("_", "-")
    more: dict[str, Any] = {}
    value_type = _value_type(field.annotation)
    if name in _READERS:
        more["parser"], more["metavar"] = _READERS[name]
        value_type = str
    names = [f"{flag}/--no-{name.replace('_', '-')}"] if value_type is bool else [flag]
    option = typer.Option(*names, help=about, rich_help_panel=panel, show_default=False, **more)
    annotation = Annotated[value_type | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _spell(default: Any) -> str:
    return ("no", "yes")[default] if isinstance(default, bool) else str(default)


def _value_type(annotation: Any) -> Any:
    """The type of a setting as the command line reads it: None and constraints aside."""
    if get_origin(annotation) is Annotated:
        return _value_type(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return list[_value_type(get_args(annotation)[0])]  # type: ignore[misc]
    if isinstance(annotation, type) or get_origin(annotation) is Literal:
        return annotation
    first, *_ = (member for member in get_args(annotation) if member is not NoneType)
    return _value_type(first)
