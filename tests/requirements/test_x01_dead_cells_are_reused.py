"""X1: dead slots are reused by new tokens: steady decode at a fixed budget copies nothing and takes no block."""

from __future__ import annotations

import numpy as np
import pytest

from tests.driving import Driver, tokens
from vtoken.memory.kv_cache_manager import KVCacheManager


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_x01_steady_decode_at_a_fixed_budget_copies_nothing(block_size: int) -> None:
    driver = Driver(num_blocks=100, block_size=block_size, max_num_batched_tokens=128)
    request = driver.add(tokens(20, 1), 400, kv_policy="random", kv_budget=40, kv_trigger="always", kv_stride=16)
    driver.run_until(lambda: driver.memory.tokens.lengths.max() > 100)
    relocated, taken = driver.memory.counters.tokens_relocated, driver.memory.counters.blocks_taken
    reused, length = driver.memory.counters.cells_reused, int(driver.memory.tokens.lengths.max())
    driver.run()
    written = len(request.sequences[0].token_ids) - 1 - length  # the last token needs no cell
    assert driver.memory.counters.cells_reused - reused == written > 250
    assert driver.memory.counters.tokens_relocated == relocated
    assert driver.memory.counters.blocks_taken == taken
    assert driver.counters.tokens_evicted_at_places > 300


def test_x01_a_new_block_in_the_place_of_one_that_was_returned_is_no_dead_cell() -> None:
    books = KVCacheManager(num_blocks=8, block_size=4)
    lane = np.array([books.admit(num_tokens=10)])

    def write(count: int) -> int:
        before = books.counters.cells_reused
        for _ in range(count):
            books.extend(books.plan_extend(lane, np.array([1])))
        return books.counters.cells_reused - before

    assert write(10) == 0
    books.evict(np.repeat(lane, 4), np.arange(4, 8))
    books.reclaim(lane)
    assert write(2) == 0  # the rest of the last block
    assert write(4) == 0  # a new block, before the last one
    books.evict(np.repeat(lane, 2), np.array([5, 7]))
    assert write(2) == 2
