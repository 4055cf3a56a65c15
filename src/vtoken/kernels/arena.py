"""Memory for packed weights on huge pages: streaming through small ones costs up to a third of the bandwidth."""

from __future__ import annotations

import mmap
import weakref
from threading import Lock
from typing import Final

import torch
from torch import Tensor

ALIGNMENT: Final = 64  # bytes: a cache line
PADDING: Final = 64  # bytes behind each piece that may be read, as kernels do
HUGE: Final = 2 << 20
CHUNK: Final = 32 << 20  # of address space; memory is taken page by page, when written

_chunk: weakref.ref[mmap.mmap] | None = None  # where the next pieces come from, as long as any of its pieces lives
_used = 0
_lock = Lock()


def allocate(nbytes: int) -> Tensor:
    """uint8 [nbytes], aligned, zeroed; its memory is given back once no piece of the same chunk is in use."""
    global _chunk, _used
    with _lock:
        memory = _chunk() if _chunk is not None else None
        if memory is None or _used + nbytes + PADDING > len(memory):
            memory = _map(max(CHUNK, nbytes + PADDING))
            _chunk, _used = weakref.ref(memory), 0
        piece = torch.frombuffer(memory, dtype=torch.uint8, count=max(nbytes, 1), offset=_used)[:nbytes]
        _used += -(-(nbytes + PADDING) // ALIGNMENT) * ALIGNMENT
    return piece


def _map(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return mmap.mmap(-1, nbytes)
    # Private: memory that could be shared follows another setting of the system. Whole huge pages, so that the last
    # one is one.
    memory = mmap.mmap(-1, -(-nbytes // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
