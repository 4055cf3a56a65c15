"""Where converted models, compiled kernels and measurements are kept: `$VTOKEN_CACHE`, else `~/.cache/vtoken`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from vtoken.base.errors import CheckpointError


def cache_dir() -> Path:
    """Root of the cache; it may not exist yet. Raises CheckpointError where it never could."""
    chosen = os.environ.get("VTOKEN_CACHE") or "~/.cache/vtoken"
    try:
        path = Path(chosen).expanduser()
        path.is_dir()  # raises where no folder could ever be
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"no cache in {chosen} ({reason}); set VTOKEN_CACHE to another folder") from error
    return path


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` that becomes `target` if the block ends well and vanishes if not.

    So a folder in the cache is always whole. If someone else finished the same folder meanwhile, theirs stays. Raises
    CheckpointError where the cache cannot be written.
    """
    work = target.with_name(f".{target.name}-{uuid4().hex}")
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"the cache cannot be written ({error}); set VTOKEN_CACHE to another folder") from error
    try:
        yield work
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
