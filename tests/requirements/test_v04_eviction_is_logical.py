"""V4: eviction changes liveness only: no pool, no table of blocks and no cell is different afterwards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.memory.model import fingerprint
from tests.strategies import block_sizes


@given(size=block_sizes(), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3), data=st.data())
def test_pools_tables_and_cells_are_as_before(size: int, lengths: list[int], data: st.DataObject) -> None:
    books = BooksDriver(size, num_blocks=60)
    for length in lengths:
        lane = books.compute([i % 2 for i in range(length)])
        if data.draw(st.booleans()):
            books.fork(lane)
    live = {lane: st.sampled_from(sorted(model.live)) for lane, model in books.lanes.items()}
    victims = {lane: data.draw(st.lists(positions, unique=True)) for lane, positions in live.items()}
    tables, cells = books.manager.blocks.ids.copy(), books.store.device.copy()
    pools, usage = fingerprint(books.manager)[0], books.manager.usage()
    index = list(books.manager.prefix._entries)

    books.evict(victims)

    assert fingerprint(books.manager)[0] == pools
    assert (books.manager.blocks.ids == tables).all()
    assert (books.store.device == cells).all()
    assert list(books.manager.prefix._entries) == index
    after = books.manager.usage()
    assert (after.free_blocks, after.held_blocks, after.cached_blocks, after.shared_blocks) == (
        usage.free_blocks,
        usage.held_blocks,
        usage.cached_blocks,
        usage.shared_blocks,
    )
    for lane, positions in victims.items():
        assert not set(positions) & set(books.manager.tokens.live(lane)[1].tolist())
        assert set(books.manager.tokens.died_at(lane)) == set(positions)
