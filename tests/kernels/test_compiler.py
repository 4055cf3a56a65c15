"""The kernels are compiled once a machine, and a machine that cannot says so in one line."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vtoken.attention.registry import BACKENDS
from vtoken.base.errors import ConfigError
from vtoken.engine import build
from vtoken.kernels import compiler
from vtoken.kernels.compiler import KernelsUnavailable
from vtoken.kernels.library import library


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tiny sources in place of the real ones, and an empty cache."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "shared.h"\nextern "C" int vtoken_one() { return ONE; }\n')
    (folder / "two.cpp").write_text('extern "C" int vtoken_two() { return 2; }\n')
    (folder / "shared.h").write_text("#define ONE 1\n")
    monkeypatch.setattr(compiler, "SOURCES", folder)
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "cache"))
    return folder


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a compiler in place that notes each of its calls in the file that is returned."""
    calls = tmp_path / "calls"
    (real,) = compiler.find_compiler()
    monkeypatch.setenv("CXX", str(program(tmp_path / "c++", f'echo . >> {calls}\nexec {real} "$@"')))
    return calls


def test_compiled_once(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    calls = counting(tmp_path, monkeypatch)
    with caplog.at_level(logging.INFO, "vtoken"):
        first = compiler.build()
    assert [record.message for record in caplog.records] == [
        "compiling the CPU kernels for this machine, once; this takes some seconds"
    ]
    num_calls = len(calls.read_text().split())
    assert num_calls == 3, "two sources and a link"
    assert compiler.build() == first
    assert len(calls.read_text().split()) == num_calls
    assert set(os.listdir(first.parent)) == {compiler.LIBRARY_NAME, compiler.DIGEST_NAME}, "nothing else is left behind"


DAMAGES = {
    "empty": lambda library: library.write_bytes(b""),
    "text": lambda library: library.write_text("no library"),
    "cut": lambda library: os.truncate(library, library.stat().st_size // 2),  # to load it would end the process
    "a bit": lambda library: library.write_bytes(library.read_bytes()[:-1] + b"x"),
    "gone": lambda library: library.unlink(),
    "folder": lambda library: (library.unlink(), library.mkdir(), (library / "x").touch()),
    "no digest": lambda library: (library.parent / compiler.DIGEST_NAME).unlink(),
    "wrong digest": lambda library: (library.parent / compiler.DIGEST_NAME).write_bytes(b"x"),
    "file for a folder": lambda library: (shutil.rmtree(library.parent), library.parent.touch()),
}


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing was loaded yet, and what a test loads is forgotten."""
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_compiled_again_once(sources: Path, tmp_path: Path, monkeypatch, damage) -> None:
    calls = counting(tmp_path, monkeypatch)
    path = compiler.build()
    damage(path)
    assert library().vtoken_one() == 1
    assert compiler.build() == path
    assert len(calls.read_text().split()) == 6, "all of it twice"
    assert set(os.listdir(path.parent)) == {compiler.LIBRARY_NAME, compiler.DIGEST_NAME}
    assert os.listdir(path.parents[1]) == [path.parent.name]


@pytest.mark.usefixtures("fresh")
def test_a_damaged_library_that_cannot_be_compiled_again(sources: Path) -> None:
    path = compiler.build()
    path.write_bytes(b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_compile", lambda *_: (_ for _ in ()).throw(KernelsUnavailable("no room")))
        with pytest.raises(KernelsUnavailable, match="no room"):
            library()
    assert library().vtoken_one() == 1


def test_processes_that_find_it_damaged_together_all_get_a_whole_one(sources: Path) -> None:
    path = compiler.build()
    path.write_bytes(path.read_bytes()[:1000])
    script = (
        "import sys; from pathlib import Path; from vtoken.kernels import compiler; "
        "compiler.SOURCES = Path(sys.argv[1]); from vtoken.kernels.library import library; "
        "print(library().vtoken_one())"
    )
    command = [sys.executable, "-c", script, str(sources)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate() for process in running]
    assert [out for out, _ in said] == ["1\n"] * 4, said
    assert compiler._is_whole(path.parent)


def test_what_decides_the_code_decides_the_place(sources: Path, tmp_path: Path, monkeypatch) -> None:
    places = {compiler.build()}
    places.add(compiler.build("portable"))
    (sources / "shared.h").write_text("#define ONE 11\n")  # a header alone
    places.add(compiler.build())
    monkeypatch.setattr(compiler, "machine_id", lambda: "another processor")
    places.add(compiler.build())
    counting(tmp_path, monkeypatch)
    places.add(compiler.build())
    assert len(places) == 5


def test_a_broken_source(sources: Path) -> None:
    (sources / "two.cpp").write_text("int f() { return undeclared; }\n")
    with pytest.raises(KernelsUnavailable, match="cannot compile the kernels: .*undeclared") as caught:
        compiler.build()
    assert "\n" not in str(caught.value)
    assert not list((sources.parent / "cache" / "kernels").iterdir()), "no half library is left behind"


@pytest.mark.parametrize(
    ("script", "reason"),
    [("exit 1", "it gave no reason"), ("echo error: out of disk >&2; exit 1", "out of disk")],
)
def test_a_compiler_that_fails(sources: Path, tmp_path: Path, monkeypatch, script: str, reason: str) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path / "c++", script)))
    with pytest.raises(KernelsUnavailable, match=reason):
        compiler.build()


def test_a_command_of_several_words(sources: Path, tmp_path: Path, monkeypatch) -> None:
    """As `ccache g++` is."""
    (real,) = compiler.find_compiler()
    wrapper = program(tmp_path / "wrapper", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{wrapper} {real}")
    assert compiler.build().is_file()


def test_no_compiler_is_left_running(sources: Path, tmp_path: Path, monkeypatch) -> None:
    """One source fails at once, the other takes its time: it is waited for."""
    ended = tmp_path / "ended"
    script = f'case "$*" in *one.cpp*) exit 1;; esac; sleep 0.3; echo . > {ended}'
    monkeypatch.setenv("CXX", str(program(tmp_path / "c++", script)))
    with pytest.raises(KernelsUnavailable):
        compiler.build()
    assert ended.exists()


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler, on which nothing was loaded yet."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    library.cache_clear()


@pytest.mark.usefixtures("sources", "nothing")
class TestNoCompiler:
    def test_the_reason(self) -> None:
        with pytest.raises(KernelsUnavailable, match=r"no C\+\+ compiler"):
            compiler.build()

    def test_auto_falls_back_to_the_reference_and_says_so_once(self, caplog) -> None:
        assert build._attention_backend("auto") == "reference"
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "no C++ compiler" in record.message
        assert "\n" not in record.message

    def test_asked_for_by_name(self) -> None:
        with pytest.raises(
            ConfigError, match=r"attention_backend='cpu' cannot run here: no C\+\+ compiler.*'reference'"
        ):
            build._attention_backend("cpu")

    def test_a_wrong_cxx(self, monkeypatch) -> None:
        monkeypatch.setenv("CXX", "/not/there/g++")
        with pytest.raises(KernelsUnavailable, match="CXX=/not/there/g"):
            compiler.build()


def test_with_a_compiler_auto_is_cpu() -> None:
    assert build._attention_backend("auto") == "cpu"
    assert BACKENDS["cpu"].compiled
