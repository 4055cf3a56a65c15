"""`BlockPool`: who holds which block, and which block is handed out next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vtoken.base.errors import InvariantError
from vtoken.memory.bits import Ints, words_per_block


class BlockPool:
    """Block ids, reference counts, pins and the free list of one memory (device or host).

    A block is in exactly one state:

    ========  ==================================================
    free      no references, no pins, not published: on the free list
    held      references > 0
    cached    published in the prefix index, no references
    pinned    no references, not published, but a copy beside the steps may still touch it
    ========  ==================================================

    The free list is a stack, so a block that was just used is used again while its memory is warm; `free_order` sets
    the order in which the blocks of a fresh pool are handed out.
    """

    def __init__(self, num_blocks: int, block_size: int, free_order: Sequence[int] | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        order = np.arange(num_blocks) if free_order is None else np.asarray(free_order)
        if not np.array_equal(np.sort(order), np.arange(num_blocks)):
            raise ValueError(f"free_order must name each of the {num_blocks} blocks once, got {list(order)}")
        self.refs: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.pins: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.published: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        # Cells that take no new token because a copy beside the steps reads or writes there.
        self.closed: NDArray[np.uint32] = np.zeros((num_blocks, words_per_block(block_size)), np.uint32)
        # Stack: [0, num_free) is free, the next one out at num_free - 1.
        self._stack: NDArray[np.int32] = order[::-1].astype(np.int32)
        self.num_free = num_blocks

    @property
    def free_blocks(self) -> NDArray[np.int32]:
        """The free blocks, the next one out first."""
        return self._stack[: self.num_free][::-1].copy()

    def take(self, count: int) -> NDArray[np.int32]:
        """Hand out `count` free blocks with one reference each."""
        if count > self.num_free:
            raise InvariantError(f"{count} blocks taken from a pool with {self.num_free} free")
        blocks = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self.refs[blocks] = 1
        return blocks

    def add_refs(self, blocks: Ints) -> None:
        """One more holder for each block named (once for each time it is named)."""
        np.add.at(self.refs, blocks, 1)

    def drop_refs(self, blocks: Ints) -> NDArray[np.int32]:
        """One holder less for each block named. Returns the blocks that are cached from now on, in the order given."""
        np.subtract.at(self.refs, blocks, 1)
        if len(blocks) and int(self.refs[blocks].min()) < 0:
            raise InvariantError(f"a block was released more often than it was held: {blocks[self.refs[blocks] < 0]}")
        unheld: NDArray[np.int32] = blocks[self.refs[blocks] == 0].astype(np.int32)
        if len(unheld) > 1:
            unheld = unheld[np.sort(np.unique(unheld, return_index=True)[1])]
        is_cached = self.published[unheld]
        self._give(unheld[~is_cached & (self.pins[unheld] == 0)])
        cached: NDArray[np.int32] = unheld[is_cached]
        return cached

    def unpublish(self, block: int) -> None:
        """The prefix index let go of the block: if nobody else holds it, it is free."""
        self.published[block] = False
        if self.refs[block] == 0 and self.pins[block] == 0:
            self._give(np.array([block], np.int32))

    def pin(self, blocks: Ints) -> None:
        self.pins[blocks] += 1

    def unpin(self, blocks: Ints) -> None:
        """Blocks that nobody holds and no index knows go back to the free list with their last pin."""
        self.pins[blocks] -= 1
        self._give(blocks[(self.pins[blocks] == 0) & (self.refs[blocks] == 0) & ~self.published[blocks]])

    def _give(self, blocks: Ints) -> None:
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)

    def check(self) -> None:
        """Raise InvariantError unless every block is in exactly one state."""
        free = np.zeros(self.num_blocks, np.int64)
        np.add.at(free, self._stack[: self.num_free], 1)
        held, idle = self.refs > 0, self.refs == 0
        states = free + held + (idle & self.published) + (idle & ~self.published & (self.pins > 0))
        # Invariant: free + held + cached + pinned == num_blocks, each block counted once.
        if (states != 1).any():
            block = int(np.flatnonzero(states != 1)[0])
            raise InvariantError(
                f"block {block} is in {states[block]} states: free {free[block]}, refs {self.refs[block]}, "
                f"published {self.published[block]}, pins {self.pins[block]}"
            )
        if (self.refs < 0).any() or (self.pins < 0).any():
            raise InvariantError("negative reference count or pin")
        if self.closed[self.pins == 0].any():
            raise InvariantError("a cell is closed in a block that no copy touches")
