from __future__ import annotations

from tests.driving import Driver, tokens
from vtoken.bench.slot_map import Cell, SlotWatch


def test_cells_before_and_after_packing() -> None:
    """Blocks of 4: seven tokens, of which positions 0 and 5 are left; packed they need one block."""
    driver = Driver(4, 4, enable_prefix_caching=False)
    request = driver.add(tokens(7), 4)
    driver.step()
    watch = SlotWatch(driver.scheduler)
    driver.scheduler.evict(request.sequences[0], [1, 2, 3, 4, 6])
    watch.before()
    driver.memory.reclaim([request.lanes[0]])
    watch.after()
    shown = watch.best
    assert shown is not None
    assert shown.blocks_returned == 1
    live, dead, tail, free = (int(cell) for cell in (Cell.LIVE, Cell.DEAD, Cell.TAIL, Cell.FREE))
    assert shown.before.tolist()[:2] == [[live, dead, dead, dead], [dead, live, dead, tail]]
    assert sum(cell == live for block in shown.after.tolist() for cell in block) == 2
    assert sum(block == [free] * 4 for block in shown.after.tolist()) == 3
    assert (shown.before[2:] == free).all()


def test_tokens_that_die_in_the_same_step_are_shown_dead_before() -> None:
    driver = Driver(4, 4, enable_prefix_caching=False)
    request = driver.add(tokens(8), 4)
    driver.step()
    sequence = request.sequences[0]
    watch = SlotWatch(driver.scheduler)
    driver.scheduler.evict(sequence, [1])
    watch.before()
    driver.scheduler.evict(sequence, [2, 3, 5, 6, 7])
    driver.memory.reclaim([request.lanes[0]])
    watch.after()
    assert watch.best is not None
    live, dead = int(Cell.LIVE), int(Cell.DEAD)
    assert watch.best.before.tolist()[:2] == [[live, dead, dead, dead], [live, dead, dead, dead]]


def test_the_largest_reclaim_is_kept() -> None:
    driver = Driver(8, 4, enable_prefix_caching=False)
    requests = [driver.add(tokens(4 * n, n), 2) for n in (4, 2)]
    driver.step()
    watch = SlotWatch(driver.scheduler)
    for request, length in zip(requests, (16, 8), strict=True):
        driver.scheduler.evict(request.sequences[0], [p for p in range(length) if p % 4])
        watch.before()
        driver.memory.reclaim([request.lanes[0]])
        watch.after()
    assert watch.best is not None
    assert watch.best.blocks_returned == 3
