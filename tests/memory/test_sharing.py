"""Forks and shared prefixes: nobody writes, moves or loses what another one reads."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes


def text(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def test_u33_three_samples_of_a_prompt_of_20_tokens() -> None:
    books = BooksDriver(16)
    lane = books.compute(text(20), publish=False)
    samples = [lane, books.fork(lane), books.fork(lane)]
    books.grow(dict.fromkeys(samples, 1))
    first, last = zip(*(books.blocks_of(sample) for sample in samples), strict=True)
    assert len(set(first)) == 1
    assert len(set(last)) == 3
    assert books.manager.pool.refs[first[0]] == 3
    books.release([samples[1]])
    assert books.manager.pool.refs[first[0]] == 2


@settings(max_examples=50)
@given(
    size=block_sizes(),
    length=st.integers(1, 40),
    steps=st.lists(st.tuples(st.sampled_from(("fork", "append", "free")), st.integers(0, 2**16)), max_size=25),
)
def test_u33_random_fork_append_free(size: int, length: int, steps: list[tuple[str, int]]) -> None:
    """The driver checks after each step that everybody reads its own and that references are as many as holders."""
    books = BooksDriver(size, num_blocks=60)
    books.compute(text(length))
    for step, number in steps:
        lanes = list(books.lanes)
        if not lanes:
            break
        lane = lanes[number % len(lanes)]
        if step == "fork" and len(lanes) < 6:
            books.fork(lane)
        elif step == "append":
            copied = books.manager.counters.blocks_copied_on_write
            books.grow({lane: 1 + number % (size + 1)}, publish=bool(number % 2))
            assert books.manager.counters.blocks_copied_on_write - copied <= 1
        elif step == "free":
            books.release([lane])
    books.finish_all()


def test_u56_a_branch_that_evicts_leaves_its_sibling_alone() -> None:
    books = BooksDriver()
    lane = books.compute(text(14), publish=False)
    twin = books.fork(lane)
    before = books.manager.blocks.masks[lane].copy()
    books.evict({twin: [1, 2, 5, 13]})
    assert (books.manager.blocks.masks[lane] == before).all()
    assert books.manager.tokens.died_at(lane) == {}
    books.reclaim(twin)
    books.grow({twin: 9, lane: 1})
    books.evict({twin: [p for p in range(12) if p in books.lanes[twin].live]})
    held = len(books.blocks_of(twin))
    assert books.reclaim(twin) == 0, "the sibling still holds what they share"
    assert len(books.blocks_of(twin)) <= held - 3, "but its own references go"
    assert books.manager.pool.refs[books.blocks_of(lane)[0]] == 1
    books.release([twin])
    books.grow({lane: 3})


def test_u56_holes_in_shared_blocks_are_not_filled_while_they_are_shared() -> None:
    books = BooksDriver()
    lane = books.compute(text(8), publish=False)
    twin = books.fork(lane)
    books.evict({lane: [1], twin: [1]})
    assert books.grow({lane: 1}).rows.tolist() == [8]
    books.release([twin])
    assert books.grow({lane: 4}).rows.tolist() == [1, 9, 10, 11]


def test_a_fork_of_a_prompt_in_chunks_keeps_its_reserve_to_itself() -> None:
    books = BooksDriver()
    lane = books.admit(text(16))
    books.grow({lane: 6})
    twin = books.fork(lane)
    assert len(books.blocks_of(lane)) == 4
    assert len(books.blocks_of(twin)) == 2
    books.grow({lane: 10, twin: 10})


def test_a_fork_and_its_origin_publish_the_same_block_once() -> None:
    books = BooksDriver()
    lane = books.compute(text(8))
    twin = books.fork(lane)
    books.grow({lane: 5, twin: 5}, publish=True)
    books.release([lane])
    books.compute(books.lanes[twin].text[:12])
    books.finish_all()
