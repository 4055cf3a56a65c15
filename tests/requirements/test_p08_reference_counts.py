"""P8 (books): parallel samples share the prompt, a system prompt is computed once."""

from __future__ import annotations

from tests.memory.driver import BooksDriver

SYSTEM = list(range(32))


def test_samples_share_the_prompt_and_the_last_one_gives_it_back() -> None:
    books = BooksDriver(16, num_blocks=12)
    lane = books.compute([*SYSTEM, 70, 71, 72], publish=False)
    samples = [lane, *(books.fork(lane) for _ in range(3))]
    assert [state.refs for state in books.manager.table(lane)] == [4, 4, 4]
    assert books.manager.pool.num_free == 12 - 3
    books.grow(dict.fromkeys(samples, 1))
    assert [[state.refs for state in books.manager.table(sample)] for sample in samples] == [[4, 4, 1]] * 4
    for num_left, sample in zip((3, 2, 1), samples, strict=False):
        books.release([sample])
        assert [state.refs for state in books.manager.table(samples[-1])] == [num_left, num_left, 1]
    books.release(samples[-1:])
    assert books.manager.pool.num_free == 12


def test_a_system_prompt_is_computed_once() -> None:
    books = BooksDriver(16, num_blocks=40)
    num_computed = 0
    for user in range(5):
        lane = books.admit([*SYSTEM, *range(100 * user + 100, 100 * user + 110)])
        rest = len(SYSTEM) + 10 - int(books.manager.tokens.lengths[lane])
        books.grow({lane: rest}, publish=True)
        num_computed += rest
        assert [state.refs for state in books.manager.table(lane)] == [user + 1, user + 1, 1]
    assert num_computed == len(SYSTEM) + 5 * 10
    assert books.manager.counters.prefix_hit_tokens == 4 * len(SYSTEM)
