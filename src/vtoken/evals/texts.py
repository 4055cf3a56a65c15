"""Texts to read: a file, or the one that comes with the package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from vtoken.base.errors import ConfigError

BUILT_IN: Final = "the letters of Mary Shelley's Frankenstein (1818)"


@dataclass(frozen=True)
class Text:
    name: str  # what people are told it is
    content: str


def read_text(path: Path | None) -> Text:
    """A file of UTF-8 text, or without one the text of the package, some 5,500 words in the public domain.

    Raises ConfigError for what cannot be read and for a file without text.
    """
    if path is None:
        return Text(BUILT_IN, files("vtoken.evals").joinpath("frankenstein.txt").read_text(encoding="utf-8"))
    content = read_file(path, "text")
    if not content.strip():
        raise ConfigError(f"text: {path} has no text in it")
    return Text(path.name, content)


def read_file(path: Path, option: str) -> str:
    """The content of a UTF-8 file that the user named with an option. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is not UTF-8 text: {error}") from None
