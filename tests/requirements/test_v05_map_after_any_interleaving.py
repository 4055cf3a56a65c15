"""V5: the map from token to slot is right after any interleaving of append, evict, reuse, relocate, fork and swap.

`tests/memory/test_state_machine.py` drives these and all other operations with shrinking; here are long random walks.
"""

from __future__ import annotations

import random

import pytest

from tests.memory.driver import BooksDriver

OPERATIONS = ("append", "append", "evict", "relocate", "relocate_beside", "finish", "fork", "swap", "reclaim", "leave")


def operate(books: BooksDriver, operation: str, draw: random.Random) -> None:
    idle = books.idle
    lane = draw.choice(idle) if idle else -1
    if operation == "finish" and books.beside:
        books.finish(draw.choice(list(books.beside)))
    elif operation == "swap" and books.swapped and draw.random() < 0.6:
        books.swap_in(books.swapped)
    elif not idle:
        return
    elif operation == "append":
        counts = {one: draw.randint(1, books.block_size + 1) for one in draw.sample(idle, draw.randint(1, len(idle)))}
        if books.extend(counts, publish=draw.random() < 0.5) is not None:
            books.run_step()
    elif operation == "evict":
        books.evict({lane: [p for p in sorted(books.lanes[lane].live) if draw.random() < 0.4]})
    elif operation.startswith("relocate"):
        rows, cells = books.movable(lane)
        count = draw.randint(0, min(len(rows), len(cells)))
        sources, targets = draw.sample(rows, count), draw.sample(cells, count)
        books.relocate(lane, sources, targets, beside=operation == "relocate_beside")
    elif operation == "fork" and len(books.lanes) < 5:
        books.fork(lane)
    elif operation == "swap":
        books.swap_out(draw.sample(idle, draw.randint(1, len(idle))))
    elif operation == "reclaim":
        books.reclaim(lane, compact=draw.random() < 0.7)
    elif operation == "leave" and len(books.lanes) > 3:
        books.release([lane])


@pytest.mark.parametrize("size", [4, 5, 16, 33, 64, 256])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_found_where_its_value_lies(size: int, seed: int) -> None:
    draw = random.Random(f"{size} {seed}")
    books = BooksDriver(size, num_blocks=24, num_host_blocks=12, check_shadow=False)
    books.compute([i % 3 for i in range(2 * size)])
    done: dict[str, int] = {}
    for _ in range(80):
        if not books.lanes:
            books.compute([draw.randint(0, 1) for _ in range(2 * size)])
        operation = draw.choice(OPERATIONS)
        operate(books, operation, draw)
        done[operation] = done.get(operation, 0) + 1
        for lane, model in books.lanes.items():
            cells = books.store.host if books.manager.on_host[lane] else books.store.device
            sample = sorted(model.live)[:: len(model.live) // 16 + 1]
            read = {p: cells[books.manager.tokens.slot_of(lane, p)] for p in sample}
            assert read == {p: model.values[p] for p in read}, f"after {operation}"
        books.verify()
    assert set(done) == set(OPERATIONS)
    books.finish_all()
