"""How many threads torch's own operations take here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small operations: a second thread gains nothing, and waiting for it on a busy machine costs much. Nor
    can the number of threads then change how a sum is cut."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
