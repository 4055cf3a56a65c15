"""`CopyEngine`: the only thing that moves KV."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.kernels import copy as kernels
from vtoken.memory.copy import Copy, CopyCounts, CopyKind
from vtoken.worker.kv_store import KVStore

logger = logging.getLogger("vtoken")


class CopyEngine:
    """Runs `Copy` orders between the device store and the host store.

    Ordered copies are done when `run` returns. Beside-copies (those with a ticket) run on one thread of their own, one
    after the other; `poll` tells which have ended. That nobody touches their cells meanwhile is the books' promise.

    `compiled` moves cells by the compiled kernels instead of torch's indexing; the result is the same.
    """

    def __init__(self, device: KVStore, host: KVStore, *, compiled: bool = False) -> None:
        assert (device.block_size, device.shape) == (host.block_size, host.shape), "stores must have one layout"
        self._device = device
        self._host = host
        self._compiled = compiled
        self._thread: ThreadPoolExecutor | None = None  # started by the first beside-copy
        self._beside: dict[int, Future[None]] = {}  # ticket -> its copy, in the order they were given
        self._never_started: list[int] = []
        self._counts_lock = threading.Lock()
        self.num_copies = dict.fromkeys(CopyKind, 0)
        """Copies done, by kind."""
        self.bytes_copied = dict.fromkeys(CopyKind, 0)
        """Bytes of KV written by them, by kind."""
        self.seconds_waited = 0.0
        """For how long steps have waited for their copies: all of an ordered copy, the start of one beside."""

    def run(self, copies: Iterable[Copy]) -> None:
        """Do the ordered copies one after the other, and start the beside-copies among them.

        If an ordered copy raises, so does this; the beside-copies behind it are never started, which `poll` tells.
        """
        left, started = list(copies), time.perf_counter()
        try:
            while left:
                copy = left[0]
                if copy.ticket is None:
                    self._copy(copy)
                else:
                    self._start(copy.ticket, copy)
                left.pop(0)
        finally:
            self.seconds_waited += time.perf_counter() - started
            self._never_started += [copy.ticket for copy in left if copy.ticket is not None]

    def _start(self, ticket: int, copy: Copy) -> None:
        assert ticket not in self._beside, f"ticket {ticket} is taken"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vtoken-copy")
        self._beside[ticket] = self._thread.submit(self._copy, copy)

    def poll(self, awaited: Iterable[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tickets of the beside-copies that have (ended, failed) since the last call.

        A copy that failed is logged; its tokens are still where they were. An `awaited` one of which nothing is known
        has failed.
        """
        unknown = [ticket for ticket in awaited if ticket not in self._beside and ticket not in self._never_started]
        done = [ticket for ticket, future in self._beside.items() if future.done()]
        errors = {ticket: error for ticket in done if (error := self._beside[ticket].exception()) is not None}
        for ticket, error in errors.items():
            logger.error("copy %d beside the steps failed: %s", ticket, error)
        failed = (*errors, *self._never_started, *unknown)
        self._never_started.clear()
        for ticket in done:
            del self._beside[ticket]
        return tuple(ticket for ticket in done if ticket not in errors), failed

    def counts(self) -> CopyCounts:
        """What was done so far; for any thread."""
        with self._counts_lock:
            return CopyCounts(self.num_copies.copy(), self.bytes_copied.copy(), self.seconds_waited)

    def close(self) -> None:
        """Wait for the copy that is running, drop those that have not begun. May be called twice."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._beside.clear()

    def _copy(self, copy: Copy) -> None:
        assert len(copy.src) == len(copy.dst), "every source has its destination"
        # Inference mode is a property of the thread, so the copy thread needs its own.
        with torch.inference_mode():
            match copy.kind:
                case CopyKind.COPY_ON_WRITE | CopyKind.RELOCATE:
                    self._copy_slots(copy)
                case CopyKind.SWAP_OUT:
                    self._copy_blocks(self._device, self._host, copy)
                case CopyKind.SWAP_IN:
                    self._copy_blocks(self._host, self._device, copy)
        with self._counts_lock:
            self.num_copies[copy.kind] += 1
            self.bytes_copied[copy.kind] += len(copy) * self._device.shape.bytes_per_token

    def _copy_slots(self, copy: Copy) -> None:
        if self._compiled:
            kernels.copy_slots(self._device.tensors, copy.src, copy.dst, _num_threads(copy))
            return
        src_blocks, src_offsets = self._split(copy.src)
        dst_blocks, dst_offsets = self._split(copy.dst)
        for tensor in self._device.tensors:
            tensor[dst_blocks, :, dst_offsets] = tensor[src_blocks, :, src_offsets]

    def _split(self, slots: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        blocks, offsets = np.divmod(slots, self._device.block_size)
        return torch.from_numpy(blocks), torch.from_numpy(offsets)

    def _copy_blocks(self, source: KVStore, target: KVStore, copy: Copy) -> None:
        src, dst = self._blocks(copy.src), self._blocks(copy.dst)
        if self._compiled:
            kernels.copy_blocks(source.tensors, target.tensors, src, dst, _num_threads(copy))
            return
        for read, write in zip(source.tensors, target.tensors, strict=True):
            write.index_copy_(0, torch.from_numpy(dst), read.index_select(0, torch.from_numpy(src)))

    def _blocks(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the whole blocks that the slots of a swap name."""
        size = self._device.block_size
        blocks = slots[::size] // size
        whole = (blocks[:, None] * size + np.arange(size)).ravel()
        assert np.array_equal(whole, slots), "a swap names whole blocks, their slots in order"
        return blocks


def _num_threads(copy: Copy) -> int:
    """All of torch's for an ordered copy, which nothing else runs beside; a beside-copy has its own thread only."""
    return torch.get_num_threads() if copy.ticket is None else 1
