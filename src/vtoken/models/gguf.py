"""GGUF files: converted once to a checkpoint folder in the cache, by way of transformers.

The conversion runs in a process of its own, so that transformers' memory (the model in float32, twice for a moment) is
gone afterwards, its bars and warnings stay off the user's terminal, and its network access is switched off for good.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vtoken.base.cache import cache_dir, new_folder
from vtoken.base.errors import CheckpointError

_MAGIC: Final = b"GGUF"
# Part of the cache key: raise it when the conversion writes something else.
_CONVERSION: Final = 1


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def convert_gguf(path: Path, progress: Callable[[str], None] = _to_stderr) -> Path:
    """The checkpoint folder for a .gguf file, from the cache unless the file is new or changed (path, size, mtime).

    Raises CheckpointError for a file that is not GGUF, is cut short, or holds a model we cannot serve.
    """
    status = path.stat()
    identity = f"{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}\n{_CONVERSION}"
    target = cache_dir() / "gguf" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not target.is_dir():
        progress(f"converting {path.name} to a checkpoint folder (once; kept in {target})")
        with new_folder(target) as work:
            write_checkpoint(path, work)
    return target


def write_checkpoint(path: Path, folder: Path) -> None:
    """Write config, float32 safetensors and tokenizer of a .gguf file into an existing folder.

    float32, because that is what its blocks decode to: half the bytes would mean other numbers.
    """
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}, expected {_MAGIC!r}")
    search_path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "vtoken.models.gguf_worker", str(path), str(folder)],
        env={**os.environ, "PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"the converter ended with code {done.returncode}"])[-1]
        raise CheckpointError(f"{path} cannot be converted: {reason}")
