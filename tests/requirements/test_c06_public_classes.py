"""C6: `TokenTable`, `BlockTable` and `SlotAllocator` are the public classes, each with its role."""

from __future__ import annotations

import numpy as np

from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import BlockState, BlockTable
from vtoken.memory.slot_allocator import SlotAllocator
from vtoken.memory.token_table import TokenTable


def test_the_three_work_together_without_the_manager() -> None:
    pool, blocks = BlockPool(4, 4, free_order=[2, 0, 1, 3]), BlockTable(4)
    tokens = TokenTable(blocks, {"mass": np.float32})
    slots = SlotAllocator(pool, blocks, tokens)

    # SlotAllocator: where new tokens go.
    lanes = np.array([0])
    placement = slots.place(lanes, np.array([6]))
    assert placement.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert placement.fresh.tolist() == [[0, 0], [0, 1]]

    # BlockTable: a sequence's blocks, and which of their slots are live.
    blocks.ids[0, :2] = pool.take(2)
    blocks.num_entries[0] = 2
    tokens.append(np.zeros(6, np.int64), placement.rows, np.arange(6))
    assert blocks.held(0).tolist() == [2, 0]
    assert blocks.live_counts(0).tolist() == [4, 2]
    assert slots.free_cells(0).tolist() == [6, 7]

    # TokenTable: from a token to its row and slot, and when it died.
    assert (tokens.row_of(0, 4), tokens.slot_of(0, 1), tokens.slot_of(0, 4)) == (4, 2 * 4 + 1, 0 * 4)
    tokens.kill(lanes, np.array([1]))
    assert tokens.died_at(0) == {1: 6}
    assert slots.free_cells(0).tolist() == [1, 6, 7]
    assert slots.place(lanes, np.array([1])).rows.tolist() == [1]


def test_the_state_of_a_block_of_a_sequence() -> None:
    state = BlockState(entry=1, block=7, filled=3, refs=2)
    assert (state.entry, state.block, state.filled, state.refs) == (1, 7, 3, 2)
