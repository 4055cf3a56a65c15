"""What a benchmark says while it runs: a bar on a terminal, elsewhere a line for everything that begins."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TextIO

from vtoken.bench.reclaim import Progress


class Lines:
    """`   12 s  chat, h2o, 50% erased, blocks of 16: naive`, written as it begins. A context manager, as tqdm is."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._started = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def update(self, n: int = 1) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        print(f"{time.monotonic() - self._started:5.0f} s  {text}", file=self._file, flush=True)


def progress(total: int) -> AbstractContextManager[Progress]:
    """For so many settings, on stderr."""
    if not sys.stderr.isatty():
        return Lines()
    from tqdm import tqdm

    bar: AbstractContextManager[Progress] = tqdm(total=total, desc="Settings", unit="setting")
    return bar
