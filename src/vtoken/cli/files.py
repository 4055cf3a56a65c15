"""Files that a command writes its findings to."""

from __future__ import annotations

from pathlib import Path

from vtoken.base.errors import ConfigError


def check_place(path: Path, option: str) -> None:
    """Raise ConfigError, naming the option, for a file that could not be: an hour of work must not end there."""
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; give the name of a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option}: {path} cannot be written: its folder does not exist")


def write(path: Path, text: str, option: str) -> None:
    """Raises ConfigError, naming the option, if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror or error}") from None
