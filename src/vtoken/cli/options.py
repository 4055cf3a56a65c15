"""Command-line options made from `Settings`: one home for a setting's name, help, type and default."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import typer

from vtoken.base.config import EngineConfig
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.units import parse_bytes
from vtoken.base.validation import Settings
from vtoken.server.settings import ServerSettings

ALL: Final = "all"  # what the command line has for a count of None

# What a message for Python users says where the command line offers nothing of the kind.
_PYTHON_ONLY: Final = ", or set skip_tokenizer_init=True and send token ids"
_NAMES: Final = sorted(
    {*EngineConfig.names(), *SamplingParams.names(), *ServerSettings.names()} - {"model"}, key=len, reverse=True
)
# Not inside a path: /models/num_blocks/ is a place.
_SETTING: Final = re.compile(rf"(?<![\w./-])(?:{'|'.join(_NAMES)})(?![\w/-]|\.\w)(?:=(?:'[^']*'|[^\s,;:()]+))?")


def as_flags(text: str) -> str:
    """`text` with settings as the command line spells them: `kv_memory='1GiB'` becomes `--kv-memory 1GiB`.

    A name of one word is a setting where a value or, at the start, a colon follows it; elsewhere it is a word.
    """

    def spell(match: re.Match[str]) -> str:
        name, _, value = match[0].partition("=")
        leads = match.start() == 0 and text[match.end() :].startswith(":")
        if not value and "_" not in name and not leads:
            return match[0]
        flag = "--" + name.replace("_", "-")
        if value in ("True", "False"):
            return flag if value == "True" else "--no-" + name.replace("_", "-")
        return f"{flag} {value.strip(chr(39))}" if value else flag

    return _SETTING.sub(spell, text.replace(_PYTHON_ONLY, ""))


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a number, got {text!r}") from None


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"expected one of {', '.join(choices)}, got {text!r}")
        return text

    return read


def _count_or_all(text: str) -> int | str:
    if text == ALL:
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected a whole number or {ALL!r}, got {text!r}") from None


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _length(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor 'auto'") from None


def read_budget(text: str) -> int | float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a whole number or a share such as 0.5, got {text!r}") from None


def _range(text: str) -> tuple[int, int]:
    start, dash, end = text.partition("-")
    if not (dash and start.isdigit() and end.isdigit()):
        raise typer.BadParameter(f"expected START-END in token positions, such as 0-24, got {text!r}")
    return int(start), int(end)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f'expected a JSON object such as \'{{"regex": "[0-9]+"}}\': {error}') from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f'expected a JSON object such as \'{{"regex": "[0-9]+"}}\', got {text}')
    return found


# Settings that read more than their type says: how, and what `--help` calls the value.
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "kv_memory": (_size, "SIZE"),
    "swap_space": (_size, "SIZE"),
    "max_model_len": (_length, "TOKENS|auto"),
    "kv_policy": (str, "NAME"),
    "kv_budget": (read_budget, "TOKENS|SHARE"),
    "kv_pin": (_range, "START-END"),
    "structured_outputs": (_object, "JSON"),
    "max_tokens": (_count_or_all, f"TOKENS|{ALL}"),
    "max_queued_requests": (_count_or_all, f"CHOICES|{ALL}"),
    "max_queued_tokens": (_count_or_all, f"TOKENS|{ALL}"),
    "max_body_size": (_size, "SIZE"),
}
_READERS_BY_TYPE: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (_whole_number, "NUMBER"),
    float: (_number, "NUMBER"),
    str: (str, "TEXT"),
}

# What vLLM's users call them.
_ALIASES: Final = {
    "num_blocks": "--num-gpu-blocks-override",
    "kv_memory": "--kv-cache-memory-bytes",
    "preemption": "--preemption-mode",
    "log_level": "--uvicorn-log-level",
}


def elsewhere(message: str) -> str:
    """What to say of an option of other engines that is none here; "" if nothing is known of it."""
    found = re.search(r"--([a-z][a-z-]*)", message)
    words = EngineConfig.elsewhere.get(found[1].replace("-", "_")) if found else None
    return "" if words is None else f": {words}"


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
            given = defaults | {
                name: None if value == ALL else value for name, value in given.items() if value is not None
            }
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
    about = as_flags(field.description or "")
    if default not in (None, ()):
        about += f" (default: {_spell(default)})"
    flag = "--" + name.replace("_", "-")
    more: dict[str, Any] = {}
    value_type = _value_type(field.annotation)
    reader = _READERS.get(name) or _reader(value_type)
    if reader is not None:
        more["parser"], more["metavar"] = reader
        value_type = list[str] if get_origin(value_type) is list else str
    names = [f"{flag}/--no-{name.replace('_', '-')}"] if value_type is bool else [flag]
    names += [_ALIASES[name]] if name in _ALIASES else []
    option = typer.Option(*names, help=about, rich_help_panel=panel, show_default=False, show_envvar=False, **more)
    annotation = Annotated[value_type | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _reader(value_type: Any) -> tuple[Callable[[str], Any], str] | None:
    """How a value of this type is read, and what `--help` calls it; None where Typer's own way will do."""
    if get_origin(value_type) is list:
        return _reader(get_args(value_type)[0])
    if get_origin(value_type) is Literal:
        choices = get_args(value_type)
        return _one_of(choices), "|".join(choices)
    return _READERS_BY_TYPE.get(value_type)


def _spell(default: Any) -> str:
    return ("no", "yes")[default] if isinstance(default, bool) else str(default)


def _value_type(annotation: Any) -> Any:
    """The type of a setting as the command line reads it: None and constraints aside."""
    if get_origin(annotation) is Annotated:
        return _value_type(get_args(annotation)[0])
    if annotation is Any:
        return str  # read by a reader of its own
    if get_origin(annotation) is tuple:
        return list[_value_type(get_args(annotation)[0])]  # type: ignore[misc]
    if isinstance(annotation, type) or get_origin(annotation) is Literal:
        return annotation
    first, *_ = (member for member in get_args(annotation) if member is not NoneType)
    return _value_type(first)
