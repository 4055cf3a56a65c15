"""kvpress in an environment of its own, and where everything lies."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.peers.environments import SetupError, peers_dir

REQUIREMENTS: Final = ("torch==2.13.0", "kvpress==0.5.5", "transformers==5.2.0", "accelerate==1.15.0")


def folder() -> Path:
    return peers_dir() / "kvpress"


def python() -> Path:
    """The interpreter that has kvpress."""
    return folder() / "venv" / "bin" / "python"


def set_up(progress: Callable[[str], None] = print) -> None:
    """Make the environment if it is not there, or was made by another recipe. Raises SetupError."""
    stamp, log = folder() / "stamp", folder() / "setup.log"
    recipe = " ".join(REQUIREMENTS)
    if stamp.is_file() and stamp.read_text() == recipe:
        return
    folder().mkdir(parents=True, exist_ok=True)
    progress(f"set-up: kvpress (log: {log})")
    if not python().is_file():
        _command([sys.executable, "-m", "venv", str(folder() / "venv")], log)
    flags = shlex.split(os.environ.get("VTOKEN_PEERS_PIP_FLAGS", ""))
    _command([str(python()), "-m", "pip", "install", "--no-input", *flags, *REQUIREMENTS], log)
    stamp.write_text(recipe)


def _command(command: list[str], log: Path) -> None:
    with log.open("a") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise SetupError(f"{shlex.join(command)} ended with code {code}: {lines[-1]} (log: {log})")
