from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from vtoken.cli.main import run


class Ran(NamedTuple):
    code: int | str | None
    out: str
    err: str


def process(*arguments: str, stdout: int, buffered: bool = True) -> subprocess.Popen[str]:
    """`vtoken` in a process of its own, with standard output where a test wants it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [sys.executable, "-c", "from vtoken.cli.main import run; run()", *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """What a command logs it settles for its process, which here is that of all tests."""
    loggers = [logging.getLogger(name) for name in ("vtoken", "vtoken.engine")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def vtoken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process: `vtoken("models", "list")`."""

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["vtoken", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return Ran(ended.value.code or 0, captured.out, captured.err)

    return call
