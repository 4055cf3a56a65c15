"""From what a user calls a model to a checkpoint folder. No torch, and no network ever."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from vtoken.base.errors import CheckpointError
from vtoken.base.registry import suggest
from vtoken.base.validation import shorten
from vtoken.models.catalog import CATALOG, model_folder
from vtoken.models.gguf import convert_gguf

_EXPECTED: Final = f"a checkpoint folder, a .gguf file or one of the models: {', '.join(CATALOG)}"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(name_or_path: str | Path) -> Path:
    """The checkpoint folder of a folder, a .gguf file (converted once, then from the cache) or a catalogue name.

    Raises CheckpointError when there is none, saying what to do.
    """
    if name_or_path == "":  # Path("") would be the current folder
        raise CheckpointError(f"the model's name is empty; expected {_EXPECTED}")
    try:
        path = Path(name_or_path).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long, not allowed, too many links; or "~nobody"
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{shorten(str(name_or_path))} cannot be looked up ({reason}); expected {_EXPECTED}"
        ) from error
    if is_folder:
        return path
    if is_file:
        if path.suffix.lower() == ".gguf":
            return convert_gguf(path)
        raise CheckpointError(f"{path} is a file; expected a checkpoint folder or a .gguf file")
    name = str(name_or_path)
    if name in CATALOG:
        folder = model_folder(name)
        if folder.is_dir():
            return folder
        raise CheckpointError(f"model {name!r} is not here yet; get it with: vtoken models get {name}")
    if _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{name} does not exist here, and looks like a Hugging Face hub name; vtoken loads nothing from the hub: "
            "download the model and give the path of its folder, or get a small one with: "
            f"vtoken models get {next(iter(CATALOG))}"
        )
    raise CheckpointError(f"{name} does not exist; {suggest(name.lower(), list(CATALOG))}expected {_EXPECTED}")
