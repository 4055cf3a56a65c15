"""lm-eval in an environment of its own, vtoken beside it from this working tree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.peers.environments import TORCH, TRANSFORMERS, peers_dir, python_environment

ROOT: Final = Path(__file__).resolve().parents[2]
LM_EVAL: Final = "lm-eval==0.4.13"
REQUIREMENTS: Final = (TORCH, LM_EVAL, *TRANSFORMERS[:2])  # transformers and accelerate, as the other peers have them


def folder() -> Path:
    return peers_dir() / "lm-eval"


def python() -> Path:
    """The interpreter that has lm-eval."""
    return folder() / "venv" / "bin" / "python"


def set_up(progress: Callable[[str], None] = print) -> None:
    """Make the environment if it is not there, or was made by another recipe. Raises SetupError."""
    stamp, log = folder() / "stamp", folder() / "setup.log"
    recipe = f"{' '.join(REQUIREMENTS)} {ROOT}"
    if stamp.is_file() and stamp.read_text() == recipe:
        return
    folder().mkdir(parents=True, exist_ok=True)
    progress(f"set-up: lm-eval (log: {log})")
    python_environment("lm-eval", [REQUIREMENTS, ["--editable", str(ROOT)]], log)
    stamp.write_text(recipe)
