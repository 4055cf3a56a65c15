"""Compile the C++ kernels for this machine, once, and keep the result.

The library lies in the cache under a key of everything that decides its code: sources, flags, compiler, processor and
torch. A changed machine or version therefore compiles anew, and an old library is never loaded by mistake. Nor is a
damaged one: a digest lies beside it, for loading a file that was cut short may end the process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

from vtoken.base.cache import cache_dir, new_folder
from vtoken.base.errors import CheckpointError, VtokenError

logger = logging.getLogger("vtoken")

SOURCES = Path(__file__).parent / "csrc"
LIBRARY_NAME = "vtoken_kernels.so"
DIGEST_NAME = "digest"

# `-ffp-contract=fast` lets `a * b + c` on vectors become one instruction. No -ffast-math: NaN and infinity must stay
# what they are. OpenMP without a runtime of our own: torch has loaded libgomp, whose threads are then shared.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
# `simd.h` picks its vector width from what these switch on.
ISA_FLAGS = {
    "native": ("-march=native",),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}


class KernelsUnavailable(VtokenError):
    """There are no compiled kernels on this machine; the message says why, in one line."""


def find_compiler() -> tuple[str, ...] | None:
    """The C++ compiler's command: `$CXX`, which may be several words (`ccache g++`), else g++ or clang++, else None."""
    chosen = os.environ.get("CXX", "").strip()
    for command in [chosen.split()] if chosen else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0])
        if path is not None:
            return path, *command[1:]
    return None


def build(isa: str = "native") -> Path:
    """Path of the compiled library, compiled now if this machine has not done so before, or what it made is damaged.

    `isa` is one of `ISA_FLAGS`: "native" is for use, the others let tests run the code of lesser machines. Raises
    KernelsUnavailable with the reason.
    """
    compiler = find_compiler()
    if compiler is None:
        chosen = os.environ.get("CXX")
        raise KernelsUnavailable(
            f"CXX={chosen} is not a program on this machine" if chosen else "no C++ compiler (g++ or clang++) was found"
        )
    flags = (*FLAGS, *ISA_FLAGS[isa])
    try:
        target = cache_dir() / "kernels" / _key(compiler, flags)
        if not _is_whole(target):
            with new_folder(target) as folder:
                # At a level that is seen without further ado: nobody should wait for this without a word.
                logger.warning("compiling the CPU kernels for this machine, once; this takes some seconds")
                _compile(compiler, flags, folder / LIBRARY_NAME)
                (folder / DIGEST_NAME).write_bytes(_digest(folder / LIBRARY_NAME))
                _mend(target, folder)
    except CheckpointError as error:  # the cache cannot be written
        raise KernelsUnavailable(str(error)) from error
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be kept: {error}") from error
    return target / LIBRARY_NAME


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / DIGEST_NAME).read_bytes() == _digest(folder / LIBRARY_NAME)
    except OSError:
        return False


def _digest(library: Path) -> bytes:
    return hashlib.blake2b(library.read_bytes()).digest()


def _mend(target: Path, folder: Path) -> None:
    """Put what was compiled into `folder` in place of the damaged parts of `target`, if there are any.

    Each file is replaced at once, so that other processes, which may be doing the same, find it whole whenever they
    look; what they have loaded stays theirs.
    """
    if target.exists() and not target.is_dir():
        target.unlink(missing_ok=True)
    for name in (LIBRARY_NAME, DIGEST_NAME) if target.is_dir() else ():
        if (target / name).is_dir():
            shutil.rmtree(target / name)
        (folder / name).replace(target / name)


def _compile(compiler: tuple[str, ...], flags: tuple[str, ...], output: Path) -> None:
    sources, name = sorted(str(path) for path in SOURCES.glob("*.cpp")), " ".join(compiler)
    try:
        # Each source apart and at the same time: the largest one decides how long it takes.
        objects = [output.with_name(Path(source).stem + ".o") for source in sources]
        running = [
            subprocess.Popen(
                [*compiler, *flags, "-c", "-o", str(made), source],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, made in zip(sources, objects, strict=True)
        ]
        # All are waited for before any is judged: none may go on writing into a folder that is given up.
        for process, said in [(process, process.communicate()[0]) for process in running]:
            if process.returncode:
                raise KernelsUnavailable(f"{name} cannot compile the kernels: {_first_error(said)}")
        command = [*compiler, *flags, "-o", str(output), *map(str, objects)]
        linked = subprocess.run(command, capture_output=True, text=True, check=False)
        if linked.returncode:
            raise KernelsUnavailable(f"{name} cannot link the kernels: {_first_error(linked.stderr)}")
        for made in objects:
            made.unlink()
    except OSError as error:
        raise KernelsUnavailable(f"{name} cannot be run: {error}") from error


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it gave no reason")


def _key(compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """Name of the folder for what this compiler makes of our sources on this processor."""
    digest = hashlib.blake2b(digest_size=10)
    status = os.stat(shutil.which(compiler[-1]) or compiler[0])  # the last word: `ccache g++`
    parts = [*compiler, str(status.st_size), str(status.st_mtime_ns), *flags, torch.__version__, machine_id()]
    digest.update("\0".join(parts).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


@cache
def machine_id() -> str:
    """What decides which instructions this processor has and how fast they are: its model and feature flags."""
    facts = [platform.machine(), platform.processor(), str(os.cpu_count())]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return " ".join(facts)
    for name in ("model name", "flags", "Features"):
        facts += [line.partition(":")[2].strip() for line in lines if line.startswith(name)][:1]
    return " ".join(facts)
