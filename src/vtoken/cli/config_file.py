"""Options of a command from a YAML file and from the environment, which counts more; most counts the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer
import yaml

from vtoken.base.errors import ConfigError
from vtoken.base.registry import suggest

logger = logging.getLogger("vtoken")

PREFIX = "VTOKEN"
_ELSEWHERE = {"VTOKEN_CACHE"}  # read by others


class _Texts(yaml.SafeLoader):
    """Values as they are written: YAML would make 83 of the key 0123, and False of the name no."""


_Texts.yaml_implicit_resolvers = {
    first: [(tag, expression) for tag, expression in resolvers if tag == "tag:yaml.org,2002:null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of an eager `--config`: what the file says is the default of the other options."""
    if path is not None:
        names = _names(context)
        context.default_map = {**(context.default_map or {}), **read_options(path, names)}
    return path


def read_options(path: Path, names: dict[str, str]) -> dict[str, Any]:
    """What a file says, as text that the options themselves read. `names`: as they may be written -> of the option.

    Raises ConfigError for a file that cannot be read, for names and values that are no options, and for an option that
    is there twice.
    """
    try:
        loader = _Texts(path.expanduser().read_text(encoding="utf-8"))
        node = loader.get_single_node()
        found = None if node is None else loader.construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"the config file {str(path)!r} cannot be read: {reason}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is damaged"
        raise ConfigError(f"the config file {str(path)!r} is no YAML{where}: {problem}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"the config file {str(path)!r}: expected lines such as 'port: 8000'")
    _check_unique(node, names, path)
    options = {}
    for written, value in found.items():
        name = names.get(str(written).replace("-", "_"))
        if name is None:
            hint = suggest(str(written).replace("-", "_"), sorted(names))
            raise ConfigError(f"the config file {str(path)!r}: unknown option {str(written)!r}; {hint}see --help")
        if name == "api_key" and not value:
            raise _no_key(f"the config file {str(path)!r}: {written}", "leave the line out")
        if value is not None:
            options[name] = _as_text(written, value, path)
    return options


def _check_unique(node: yaml.MappingNode, names: dict[str, str], path: Path) -> None:
    """YAML forbids a key that is there twice, and its loader takes the last one; two spellings are one option, too."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = names.get(str(key.value).replace("-", "_")), key.start_mark.line + 1
        if name is None:  # refused by the caller
            continue
        if name in lines:
            raise ConfigError(
                f"the config file {str(path)!r}: {key.value!r} at line {line} was set at line {lines[name]} already; "
                "leave one of them out"
            )
        lines[name] = line


def _as_text(name: object, value: Any, path: Path) -> str | list[str]:
    if isinstance(value, list) and not any(each is None or isinstance(each, list | dict) for each in value):
        return [str(each) for each in value]
    if isinstance(value, list | dict):
        raise ConfigError(f"the config file {str(path)!r}: {name}: expected a value, or a list of values")
    return str(value)


def check_key_variable() -> None:
    """Raise ConfigError if the environment's key is there and empty, which to Typer is as if it were not there."""
    variable = f"{PREFIX}_API_KEY"
    if not os.environ.get(variable, "a key").strip():
        raise _no_key(f"the environment variable {variable}", "unset it")


def _no_key(where: str, remedy: str) -> ConfigError:
    """A secret that failed to expand must not open the server to everybody."""
    return ConfigError(f"{where}: is empty, expected one key or more; {remedy} to serve anybody without a key")


def warn_of_unknown_variables(names: Collection[str]) -> None:
    """A name that nobody reads is a typing error more often than not."""
    known = {f"{PREFIX}_{name.upper()}" for name in names} | _ELSEWHERE
    for variable in sorted(set(os.environ) - known):
        if variable.startswith(f"{PREFIX}_"):
            logger.warning("the environment variable %s means nothing; %s", variable, suggest(variable, sorted(known)))


def _names(context: typer.Context) -> dict[str, str]:
    """Every way in which an option may be written -> its name."""
    names = {}
    for parameter in context.command.params:
        if parameter.name is not None and parameter.name not in ("config", "help"):
            for written in (parameter.name, *parameter.opts):
                names[written.lstrip("-").replace("-", "_")] = parameter.name
    return names
