"""Read the JSON of a checkpoint: whatever is wrong with it becomes one CheckpointError. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vtoken.base.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_json_object(text, str(path))


def parse_json_object(text: bytes, source: str) -> dict[str, Any]:
    """The object that UTF-8 JSON text holds; `source` says in messages where the text is from."""
    try:
        values = json.loads(text.decode())
    except ValueError as error:
        raise CheckpointError(f"{source}: not readable as JSON ({error})") from error
    except RecursionError:
        raise CheckpointError(f"{source}: not readable as JSON (nested too deeply)") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}: expected a JSON object, found {type(values).__name__}")
    return values
