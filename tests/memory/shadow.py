"""`ShadowStore`: a KV store that holds one number a cell, so that a test can tell whose token lies where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.copy import Copy, CopyKind
from vtoken.memory.kv_cache_manager import KVCacheManager

POISON = -1


class ShadowStore:
    """Two memories of cells: what a key and a value would be is one unique number here.

    A cell that nobody may rely on holds POISON: fresh ones, those of free blocks, and what a failed step left behind.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device: NDArray[np.int64] = np.full(num_blocks * block_size, POISON, np.int64)
        self.host: NDArray[np.int64] = np.full(num_host_blocks * block_size, POISON, np.int64)

    def run(self, copy: Copy, which: slice = slice(None)) -> None:
        """Carry out a copy, or the tokens `which` of it."""
        source = self.host if copy.kind is CopyKind.SWAP_IN else self.device
        target = self.host if copy.kind is CopyKind.SWAP_OUT else self.device
        assert len(copy.src) == len(copy.dst) == len(np.unique(copy.dst)), "a copy writes each cell once"
        if source is target:
            assert not np.isin(copy.src, copy.dst).any(), "the order of tokens within a copy must not matter"
        if copy.kind in (CopyKind.SWAP_IN, CopyKind.SWAP_OUT):
            offsets = np.arange(len(copy)) % self.block_size
            for slots in (copy.src, copy.dst):
                assert np.array_equal(slots % self.block_size, offsets), "swaps name whole blocks, in order"
        target[copy.dst[which]] = source[copy.src[which]]

    def spoil(self, copy: Copy) -> None:
        """The step failed, so the copy may not have run."""
        (self.host if copy.kind is CopyKind.SWAP_OUT else self.device)[copy.dst] = POISON

    def write(self, slots: NDArray[np.int64], values: Sequence[int]) -> None:
        """What a forward pass does with the new tokens."""
        self.device[slots] = values

    def poison_free(self, manager: KVCacheManager) -> None:
        """Whatever lay in a block that went back to a pool is gone."""
        offsets = np.arange(self.block_size)
        for memory, pool in ((self.device, manager.pool), (self.host, manager.host_pool)):
            memory[(pool.free_blocks.astype(np.int64)[:, None] * self.block_size + offsets).reshape(-1)] = POISON
