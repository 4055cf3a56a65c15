"""R10: two requests go on side by side, and the blocks of the one that ends are used again."""

from __future__ import annotations

from tests.driving import Driver, tokens


def test_blocks_of_a_finished_request_are_used_by_the_next() -> None:
    driver = Driver(num_blocks=6, block_size=4, enable_prefix_caching=False)
    first, second = driver.add(tokens(7, 0), 3), driver.add(tokens(5, 1), 10)
    third = driver.add(tokens(9, 2), 4)
    held: dict[str, set[int]] = {"0": set(), "1": set(), "2": set()}  # at any time
    alternating = []
    while driver.scheduler.num_unfinished:
        drawn = driver.step()
        assert drawn is not None
        alternating.append([sequence.request.request_id for sequence, _ in drawn])
        now = {r.request_id: {s.block for s in driver.memory.table(r.lanes[0])} for r in driver.scheduler.running}
        assert len(set().union(*now.values())) == sum(map(len, now.values()))  # no block has two owners
        for name, blocks in now.items():
            held[name] |= blocks
    driver.check_outputs()
    assert alternating[:3] == [["0", "1"]] * 3
    assert third.first_scheduled_time >= first.finish_time
    assert third.first_scheduled_time < second.finish_time
    assert held["0"] & (held["1"] | held["2"])
