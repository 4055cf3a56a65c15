"""V13: blocks that others hold are never source or destination; a published block held alone may be a source."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes


@given(
    size=block_sizes(),
    common=st.integers(0, 3),
    share=st.sampled_from(("prefix", "fork", "both")),
    kept=st.lists(st.booleans(), min_size=1, max_size=40),
    data=st.data(),
)
def test_no_copy_of_a_reclaim_touches_a_block_of_others(
    size: int, common: int, share: str, kept: list[bool], data: st.DataObject
) -> None:
    books = BooksDriver(size, num_blocks=40)
    text = [0] * (common * size) + [1] * (size + 2)
    lane = books.compute(text)
    if share != "fork":
        books.compute([0] * (common * size) + [2] * 3)
    if share != "prefix":
        books.fork(lane)
    books.grow({lane: 2 * size}, publish=data.draw(st.booleans()))
    refs = books.manager.pool.refs.copy()
    live = sorted(books.lanes[lane].live)
    books.evict({lane: [p for i, p in enumerate(live) if not kept[i % len(kept)]]})
    found = books.manager.reclaim([lane], spare_cells=data.draw(st.integers(0, 2)))
    if not found.copies:
        return
    [(_, copy)] = found.copies
    books.store.run(copy)
    books.verify()
    touched = {int(slot) // size for slot in (*copy.src, *copy.dst)}
    assert all(refs[block] == 1 for block in touched)
    written = copy.dst // size
    assert not books.manager.pool.published[written].any(), "what is written is unpublished first"


def test_a_published_source_keeps_its_content_and_becomes_cached_first_to_be_forgotten() -> None:
    books = BooksDriver(4, num_blocks=8)
    books.release([books.compute([7] * 4)])  # another cached block, older
    lane = books.compute(list(range(10)))
    source = books.blocks_of(lane)[1]
    books.evict({lane: [4, 6, 7]})
    assert books.reclaim(lane) == 1
    assert books.manager.tokens.row_of(lane, 5) == 10, "into the unpublished block"
    assert books.manager.prefix.cached_blocks[0] == source
    assert books.manager.tokens.lengths[books.admit(list(range(10)))] == 8, "still matched"


def test_a_published_block_is_unpublished_before_a_token_moves_into_it() -> None:
    books = BooksDriver(4, num_blocks=8)
    lane = books.compute(list(range(8)))
    first, second = books.blocks_of(lane)
    books.evict({lane: [1, 2, 4, 5, 6]})
    assert books.reclaim(lane) == 1
    assert books.blocks_of(lane) == [first]
    assert not books.manager.pool.published[first]
    assert books.manager.num_available == 7, "nobody can match the second block without the first"
    assert books.manager.pool.refs[second] == 0
