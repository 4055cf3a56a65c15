"""Which block is handed out next, and in which of its four states a block is."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.base.errors import InvariantError
from vtoken.memory.block_pool import BlockPool


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_fresh_blocks_come_in_the_order_asked_for() -> None:
    assert BlockPool(4, 4).take(3).tolist() == [0, 1, 2]
    pool = BlockPool(4, 4, free_order=[2, 0, 3, 1])
    assert pool.free_blocks.tolist() == [2, 0, 3, 1]
    assert pool.take(1).tolist() == [2]
    assert pool.take(2).tolist() == [0, 3]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_free_order_names_each_block_once(order: list[int]) -> None:
    with pytest.raises(ValueError, match="each of the 3 blocks once"):
        BlockPool(3, 4, order)


def test_the_block_freed_last_is_used_first() -> None:
    pool = BlockPool(4, 4)
    pool.take(4)
    pool.drop_refs(blocks(3, 1))
    assert pool.free_blocks.tolist() == [1, 3]


def test_a_block_is_free_only_when_nobody_holds_pins_or_publishes_it() -> None:
    pool = BlockPool(4, 4)
    held = pool.take(4)
    pool.add_refs(blocks(0))
    pool.published[1] = True
    pool.pin(blocks(2))
    assert pool.drop_refs(held).tolist() == [1]  # cached from now on
    pool.check()
    assert pool.free_blocks.tolist() == [3]
    pool.drop_refs(blocks(0))
    pool.unpin(blocks(2))
    pool.unpublish(1)
    pool.check()
    assert sorted(pool.free_blocks.tolist()) == [0, 1, 2, 3]


def test_a_block_dropped_by_several_holders_at_once_comes_back_once() -> None:
    pool = BlockPool(2, 4)
    held = pool.take(2)
    pool.add_refs(held)
    pool.drop_refs(np.concatenate((held, held)))
    assert pool.num_free == 2
    pool.check()


def test_what_cannot_be_is_refused() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(InvariantError, match="3 blocks taken from a pool with 2 free"):
        pool.take(3)
    pool.drop_refs(pool.take(1))
    with pytest.raises(InvariantError, match="released more often than it was held"):
        pool.drop_refs(blocks(0))


@pytest.mark.parametrize("field", ["refs", "pins", "published"])
def test_check_sees_a_free_block_in_a_second_state(field: str) -> None:
    pool = BlockPool(2, 4)
    getattr(pool, field)[1] = 1
    with pytest.raises(InvariantError, match="block 1 is in 2 states"):
        pool.check()


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(2, 4)
    pool.refs[pool.take(1)] = 0
    with pytest.raises(InvariantError, match="block 0 is in 0 states"):
        pool.check()
