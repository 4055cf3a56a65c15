"""R15: swap in bounds, and no new admissions while preempted requests wait."""

from __future__ import annotations

import pytest

from tests.driving import Driver, tokens
from vtoken.schedule.sequence import Status

PAUSED = (Status.PREEMPTED, Status.SWAPPED)


@pytest.mark.parametrize("num_host_blocks", [4, 12, 60])
def test_the_host_pool_is_never_overdrawn(num_host_blocks: int) -> None:
    driver = Driver(num_blocks=24, block_size=4, num_host_blocks=num_host_blocks, preemption="swap")
    for i in range(10):
        driver.add(tokens(6 + i, i), 30, n=1 + i % 2)
    most = 0
    while driver.scheduler.num_unfinished:
        driver.step()
        on_host = [lane for lane in driver.memory.used_lanes if driver.memory.on_host[lane]]
        used = {state.block for lane in on_host for state in driver.memory.table(lane)}
        assert len(used) == num_host_blocks - driver.memory.host_pool.num_free <= num_host_blocks
        most = max(most, len(used))
    driver.check_outputs()
    driver.check_idle()
    assert most > 0 or num_host_blocks == 4
    assert (driver.counters.swap_fallbacks > 0) == (num_host_blocks < 60)
    # What goes out comes back, once.
    assert driver.memory.counters.blocks_swapped_out == driver.memory.counters.blocks_swapped_in


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nobody_is_admitted_while_a_preempted_request_waits(preemption: str) -> None:
    driver = Driver(num_blocks=24, block_size=4, num_host_blocks=24, preemption=preemption)
    for i in range(12):
        driver.add(tokens(6 + i, i), 40)
    held_back = 0
    while driver.scheduler.num_unfinished:
        waiting = [request for request in driver.requests if request.status is Status.WAITING]
        paused = [request for request in driver.requests if request.status in PAUSED]
        preemptions = driver.counters.preemptions
        driver.step()
        if any(request.status in PAUSED for request in driver.requests):
            assert all(request.status is Status.WAITING for request in waiting)
            held_back += bool(waiting)
        if driver.counters.preemptions > preemptions:  # nobody is let in by the step that had to put somebody out
            assert all(request.status in PAUSED for request in paused)
    assert held_back > 0
    driver.check_outputs()


def test_who_comes_back_stays_for_a_while() -> None:
    """With no block to go on with it would be swapped out again at once."""
    driver = Driver(num_blocks=24, block_size=4, num_host_blocks=60, preemption="swap")
    for i in range(6):
        driver.add(tokens(10 + i, i), 30)
    returned: dict[str, int] = {}
    while driver.scheduler.num_unfinished:
        before = {request: request.status for request in driver.requests}
        driver.step()
        for request, status in before.items():
            if (status, request.status) == (Status.SWAPPED, Status.RUNNING):
                returned[request.request_id] = driver.counters.steps
            if (status, request.status) == (Status.RUNNING, Status.SWAPPED):
                assert returned.get(request.request_id) != driver.counters.steps - 1
    assert len(returned) > 1


def test_a_group_keeps_its_sharing_on_the_host() -> None:
    driver = Driver(num_blocks=24, block_size=4, num_host_blocks=24, preemption="swap", enable_prefix_caching=False)
    driver.add(tokens(20, 0), 60)
    group = driver.add(tokens(22, 1), 20, n=3, temperature=1.0)
    driver.run_until(lambda: driver.memory.usage().shared_blocks == 5)
    driver.run_until(lambda: group.status is Status.SWAPPED)
    tables = [driver.memory.table(lane) for lane in group.lanes]
    assert [[state.refs for state in table[:5]] for table in tables] == [[3] * 5] * 3
    distinct = {state.block for table in tables for state in table}
    assert len(distinct) == 24 - driver.memory.host_pool.num_free < sum(map(len, tables))
    driver.run_until(lambda: group.status is Status.RUNNING)
    assert driver.memory.usage().shared_blocks == 5
    driver.run()
