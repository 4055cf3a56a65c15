"""R4 (books): one region cut into blocks, on the device and in host memory."""

from __future__ import annotations

from tests.memory.driver import BooksDriver


def test_both_memories_are_cut_into_blocks_of_the_same_size() -> None:
    books = BooksDriver(16, num_blocks=6, num_host_blocks=3)
    manager = books.manager
    assert [(p.num_blocks, p.block_size, p.num_free) for p in (manager.pool, manager.host_pool)] == [
        (6, 16, 6),
        (3, 16, 3),
    ]
    lane = books.compute(list(range(90)), publish=False)
    slots = sorted(manager.tokens.slot_of(lane, position) for position in range(90))
    assert slots[0] == 0
    assert slots[-1] < 6 * 16
    assert len(set(slots)) == 90


def test_each_memory_hands_out_its_own_blocks() -> None:
    books = BooksDriver(16, num_blocks=6, num_host_blocks=3)
    lane = books.compute(list(range(40)), publish=False)
    assert books.swap_out([lane])
    assert (books.manager.pool.num_free, books.manager.host_pool.num_free) == (6, 0)
    other = books.compute(list(range(20)), publish=False)
    assert not books.swap_out([other]), "the host memory is full"
    assert books.swap_in([lane])
    assert (books.manager.pool.num_free, books.manager.host_pool.num_free) == (1, 3)
