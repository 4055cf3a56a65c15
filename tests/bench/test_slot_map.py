from __future__ import annotations

from tests.bench.runs import run
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


def test_what_was_handed_out_again_in_the_same_step_is_shown_free() -> None:
    """A block comes back, and the same request and a new one take blocks before the picture is taken."""
    driver = Driver(6, 4, enable_prefix_caching=False)
    request = driver.add(tokens(8), 8)
    driver.step()
    watch = SlotWatch(driver.scheduler)
    driver.scheduler.evict(request.sequences[0], [1, 2, 3, 5, 6, 7])
    watch.before()
    driver.memory.reclaim([request.lanes[0]])
    driver.add(tokens(12, 1), 2)
    driver.scheduler.schedule()
    assert driver.memory.num_held > 1, "else this tests nothing"
    watch.after()
    shown = watch.best
    assert shown is not None
    live, free = int(Cell.LIVE), int(Cell.FREE)
    num_free = [sum(block == [free] * 4 for block in cells.tolist()) for cells in (shown.before, shown.after)]
    assert shown.blocks_returned == num_free[1] - num_free[0] == 1
    assert int((shown.before == live).sum()) == int((shown.after == live).sum()) == 2


def test_lanes_may_be_added_while_a_step_is_planned() -> None:
    driver = Driver(64, 4, enable_prefix_caching=False)
    request = driver.add(tokens(8), 8)
    driver.step()
    watch = SlotWatch(driver.scheduler)
    driver.scheduler.evict(request.sequences[0], [1, 2, 3, 5, 6, 7])
    watch.before()
    num_lanes = len(driver.memory.is_open)
    driver.memory.reclaim([request.lanes[0]])
    for i in range(num_lanes + 1):
        driver.add(tokens(3, i), 2)
    driver.scheduler.schedule()
    assert len(driver.memory.is_open) > num_lanes, "else this tests nothing"
    watch.after()
    assert watch.best is not None
    assert watch.best.blocks_returned == 1


def test_the_picture_of_a_run_shows_the_blocks_that_came_back() -> None:
    shown = run("vtoken", pictures=True).recording.slot_map
    assert shown is not None
    is_free = [(cells == int(Cell.FREE)).all(axis=1) for cells in (shown.before, shown.after)]
    assert shown.blocks_returned == int(is_free[1].sum()) - int(is_free[0].sum()) > 0
    assert (shown.before == int(Cell.LIVE)).sum() == (shown.after == int(Cell.LIVE)).sum()
