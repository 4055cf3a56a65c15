from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from vtoken.cli.main import run


class Ran(NamedTuple):
    code: int | str | None
    out: str
    err: str


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
