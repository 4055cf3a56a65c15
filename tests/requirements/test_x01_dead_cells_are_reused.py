"""X1: dead slots are reused by new tokens: steady decode at a fixed budget copies nothing and takes no block."""

from __future__ import annotations

import pytest

from tests.driving import Driver, tokens


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
