"""D6-D7: three requests share the system prompt's blocks, computed once; copy on write protects the others; few-shot
examples and the turns of a conversation are shared as well."""

from __future__ import annotations

from tests.driving import Driver, Request, tokens


def blocks(driver: Driver, request: Request) -> list[int]:
    return [state.block for state in driver.memory.table(request.lanes[0])]


def test_three_requests_hold_the_same_block() -> None:
    driver = Driver(num_blocks=30, max_num_batched_tokens=256)
    system = tokens(16, 0)
    requests = [driver.add(system + tokens(5, 1 + i), 20) for i in range(3)]
    driver.step()
    tables = [blocks(driver, request) for request in requests]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert driver.memory.table(requests[0].lanes[0])[0].refs == 3
    assert driver.counters.tokens_computed == 16 + 3 * 5
    driver.run()
    assert driver.memory.counters.blocks_copied_on_write == 0  # only full blocks are shared, and nobody writes those


def test_the_first_to_write_copies_and_the_others_keep_what_they_had() -> None:
    driver = Driver(num_blocks=30, block_size=16)
    request = driver.add(tokens(20, 1), 12, n=3, temperature=1.0)
    driver.step()
    shared = driver.memory.table(request.lanes[0])[1].block
    assert [driver.memory.table(lane)[1].block for lane in request.lanes] == [shared] * 3
    driver.step()
    last = [driver.memory.table(lane)[1].block for lane in request.lanes]
    assert len(set(last)) == 3
    assert shared in last  # two copies, and the last one writes in place
    assert driver.memory.counters.blocks_copied_on_write == 2
    driver.run()  # three answers, each the model's own


def test_few_shot_examples_are_computed_once() -> None:
    driver = Driver(num_blocks=100, max_num_batched_tokens=512)
    shots = tokens(20, 0) + tokens(35, 1) + tokens(31, 2)  # a system prompt and two examples: 86 tokens, 5 full blocks
    for i in range(6):
        driver.add(shots + tokens(9, 3, i), 4)
    driver.run()
    assert driver.counters.tokens_computed == 80 + 6 * (6 + 9 + 3)
    # With the examples in another order only the block before them is common.
    other = driver.add(tokens(20, 0) + tokens(31, 2) + tokens(35, 1), 4)
    driver.run()
    assert other.num_cached_tokens == 16


def test_a_conversation_computes_each_turn_once() -> None:
    driver = Driver(num_blocks=100, block_size=4)
    history: list[int] = tokens(10, 0)
    for turn in range(5):
        history += tokens(7, 1, turn)
        before = driver.counters.tokens_computed
        request = driver.add(history, 9)
        driver.run()
        answer = request.sequences[0].output_token_ids
        known = 4 * ((len(history) - 7 - 1) // 4) if turn else 0  # all but the last token drawn, in whole blocks
        assert request.num_cached_tokens == known
        assert driver.counters.tokens_computed - before == len(history) - known + 8
        history += answer
