"""D6-D7 (books): requests share what they begin with: a system prompt, few-shot examples, the turns of a chat."""

from __future__ import annotations

from tests.memory.driver import BooksDriver

SYSTEM = list(range(16))


def test_three_requests_share_the_system_prompt_s_block() -> None:
    books = BooksDriver(16, num_blocks=16)
    lanes = [books.compute([*SYSTEM, *range(100 * i, 100 * i + 8)]) for i in (1, 2, 3)]
    first = {books.blocks_of(lane)[0] for lane in lanes}
    assert len(first) == 1
    assert books.manager.pool.refs[first.pop()] == 3
    assert books.manager.counters.prefix_hit_tokens == 2 * 16
    assert books.manager.usage().live_tokens == 16 + 3 * 8


def test_copy_on_write_protects_the_others() -> None:
    books = BooksDriver(16, num_blocks=16)
    lane = books.compute([*SYSTEM, 50, 51], publish=False)
    others = [books.fork(lane), books.fork(lane)]
    extension = books.grow({lane: 3})  # the shadow store shows that the others read what they read before
    assert len(extension.copies) == 1
    assert books.blocks_of(lane)[1] not in {books.blocks_of(other)[1] for other in others}


def test_few_shot_examples_are_shared_too() -> None:
    books = BooksDriver(16, num_blocks=16)
    shots = list(range(50))
    books.compute([*shots, 90])
    lane = books.admit([*shots, 91, 92])
    assert books.manager.tokens.lengths[lane] == 48, "whole blocks: 16 * floor(50 / 16)"


def test_a_chat_goes_on_where_it_was_answers_included() -> None:
    books = BooksDriver(16, num_blocks=16)
    lane = books.compute([*SYSTEM, *range(30, 40)])
    for _ in range(10):
        books.grow({lane: 1}, publish=True)
    history = books.lanes[lane].text
    books.release([lane])
    again = books.admit([*history, 80, 81])
    assert len(history) == 36
    assert books.manager.tokens.lengths[again] == 32, "prompt and answer of the first turn, by whole blocks"
