"""The builds that are compared: the engine as it is, and with parts of the token-level machinery replaced.

Everything is compiled for AVX2, since valgrind knows no AVX-512.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Final

from vtoken.kernels import compiler

HERE: Final = Path(__file__).parent
HEADER: Final = "attention_parts.h"

# Variant -> the header that redefines how the kernels find a past, None = as it is.
PASTS: Final = {"full": None, "plain": "plain_past.h", "twice": "listed_twice.h"}
_REPLACED: Final = {
    "inline void list_live(": "inline void masked_list_live(",
    "inline bool any_live(": "inline bool masked_any_live(",
}


def write_sources(folder: Path) -> None:
    """Write the kernel sources of every variant below `folder`, from one reading of the package's own.

    Raises RuntimeError where the kernels no longer have what is replaced.
    """
    shutil.copytree(compiler.SOURCES, folder / "full")
    for variant, header in PASTS.items():
        if header is not None:
            target = folder / variant
            shutil.copytree(folder / "full", target)
            (target / HEADER).write_text(replaced((target / HEADER).read_text(), header))
            shutil.copy(HERE / header, target / header)


def replaced(text: str, header: str) -> str:
    """`attention_parts.h` with its own functions renamed and those of `header` in their place."""
    for name, renamed in _REPLACED.items():
        if text.count(name) != 1:
            raise RuntimeError(f"{HEADER} has {text.count(name)} of {name!r}, expected one; see {HERE / header}")
        text = text.replace(name, renamed)
    return f'{text}\n#include "{header}"\n'


def use(variant: str, folder: Path) -> None:
    """Make this process compile and load the variant's kernels; before anything has loaded them."""
    compiler.ISA_FLAGS["native"] = compiler.ISA_FLAGS["avx2"]
    compiler.SOURCES = folder / variant


class Requests:
    """Valgrind's client requests."""

    def __init__(self, folder: Path) -> None:
        """Compile them below `folder`. Raises RuntimeError without a compiler or valgrind's headers."""
        made = folder / "requests.so"
        if not made.is_file():
            command = [*(compiler.find_compiler() or ("g++",)), "-O2", "-fPIC", "-shared", "-o", str(made)]
            done = subprocess.run([*command, str(HERE / "requests.cpp")], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"valgrind's client requests do not compile (is valgrind there?):\n{done.stderr}")
        self._functions = ctypes.CDLL(str(made))
        self.start = self._functions.start_counting
        self.stop = self._functions.stop_counting

    def dump(self, name: str) -> None:
        """Write what was counted since the last dump, under this name."""
        self._functions.dump(name.encode())
