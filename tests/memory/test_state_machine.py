"""Every operation of the books in random interleavings, each one checked from three sides (see `driver.py`)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.memory.driver import BooksDriver
from tests.strategies import Document, block_sizes, documents, salts

MAX_LANES = 11  # more than the tables begin with, so that they grow

choice = st.integers(0, 2**16)  # picks among whatever is there: `options[n % len(options)]`
mostly = st.sampled_from((True, True, True, False))
rarely = st.sampled_from((False, False, False, True))


def pick(options: list[int], number: int) -> int:
    return options[number % len(options)]


def pick_some(options: list[int], number: int) -> list[int]:
    """A subset that is not empty, in the order of the options."""
    chosen = [option for i, option in enumerate(options) if number >> i & 1]
    return chosen or [pick(options, number)]


class BooksMachine(RuleBasedStateMachine):
    """Rules say when an operation may be asked for; what must come of it, the driver knows."""

    books: BooksDriver

    @initialize(
        size=block_sizes(),
        num_blocks=st.integers(4, 28),
        num_host_blocks=st.integers(0, 8),
        order=st.randoms(),
        reuses=mostly,
    )
    def open_books(self, size: int, num_blocks: int, num_host_blocks: int, order: random.Random, reuses: bool) -> None:
        blocks = list(range(num_blocks))
        order.shuffle(blocks)
        self.books = BooksDriver(
            size, num_blocks, min(num_host_blocks, num_blocks), free_order=blocks, reuse_cells=reuses
        )

    def teardown(self) -> None:
        if hasattr(self, "books"):  # the run may have ended before it began
            self.books.finish_all()

    # --- guards ------------------------------------------------------------------------------------------------------

    @property
    def has_idle(self) -> bool:
        return bool(self.books.idle)

    @property
    def has_room(self) -> bool:
        return len(self.books.lanes) < MAX_LANES

    @property
    def unplanned(self) -> list[int]:
        """Lanes that the step in the making does not write for."""
        planned = {piece.lane for piece in self.books.slices}
        return [lane for lane in self.books.lanes if lane not in planned]

    @property
    def with_shared_tokens(self) -> list[int]:
        return [lane for lane in self.books.idle if self.books.shared_positions(lane)]

    @property
    def finishable(self) -> list[int]:
        """Beside-copies whose end may be reported: a launched step must not see a map change."""
        lanes = {ticket: self.books.lane_of_ticket(ticket) for ticket in self.books.beside}
        return [ticket for ticket, lane in lanes.items() if lane is None or not self.books.is_busy(lane)]

    @property
    def has_forgettable(self) -> bool:
        cached = self.books.manager.prefix.cached_blocks
        return bool((self.books.manager.pool.pins[cached] == 0).any())

    # --- rules -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.has_room)
    @rule(document=documents(), salt=salts(), is_matched=mostly, is_chunked=rarely, is_computed=mostly, runs=mostly)
    def admit(
        self, document: Document, salt: int, is_matched: bool, is_chunked: bool, is_computed: bool, runs: bool
    ) -> None:
        text = document.tokens(self.books.block_size)
        num_tokens = self.books.block_size if is_chunked else None  # its other blocks come as it grows
        lane = self.books.admit(text, salt=salt, match=is_matched, num_tokens=num_tokens)
        if lane is not None and is_computed and not self.books.is_busy(lane):
            extension = self.books.extend({lane: len(text) - len(self.books.lanes[lane].values)}, publish=True)
            if extension is not None and runs:
                self.books.run_step()

    @precondition(lambda self: self.has_idle)
    @rule(which=choice, counts=st.lists(st.integers(0, 12), min_size=1, max_size=4), publish=st.booleans(), runs=mostly)
    def extend(self, which: int, counts: list[int], publish: bool, runs: bool) -> None:
        lanes = pick_some(self.books.idle, which)
        unit = self.books.block_size // 8 + 1
        wanted = {lane: counts[i % len(counts)] * unit for i, lane in enumerate(lanes)}
        if self.books.extend(wanted, publish=publish) is not None and runs:
            self.books.run_step()

    @precondition(lambda self: self.has_idle)
    @rule(which=choice, publish=st.booleans(), runs=mostly)
    def decode(self, which: int, publish: bool, runs: bool) -> None:
        lanes = pick_some(self.books.idle, which)
        if self.books.extend(dict.fromkeys(lanes, 1), publish=publish) is not None and runs:
            self.books.run_step()

    @precondition(lambda self: bool(self.books.slices or self.books.copies or self.books.manager.prefix.num_pending))
    @rule(fails=rarely)
    def run_step(self, fails: bool) -> None:
        self.books.run_step(fails=fails)

    @precondition(lambda self: self.has_idle)
    @rule(which=choice)
    def publish(self, which: int) -> None:
        self.books.publish(pick(self.books.idle, which))

    @precondition(lambda self: self.has_idle)
    @rule(which=choice)
    def unpublish(self, which: int) -> None:
        self.books.unpublish(pick(self.books.idle, which))

    @precondition(lambda self: self.has_room and any(not self.books.manager.on_host[lane] for lane in self.books.lanes))
    @rule(which=choice)
    def fork(self, which: int) -> None:
        self.books.fork(pick([lane for lane in self.books.lanes if not self.books.manager.on_host[lane]], which))

    @precondition(lambda self: self.has_idle)
    @rule(which=choice, first=choice, length=choice, step=st.sampled_from((1, 1, 2, 3, 5)), reclaims=st.booleans())
    def evict(self, which: int, first: int, length: int, step: int, reclaims: bool) -> None:
        victims = {}
        for lane in pick_some(self.books.idle, which):
            live = sorted(self.books.lanes[lane].live)
            start = first % (len(live) + 1)
            victims[lane] = live[start : start + length % (len(live) + 1) : step]
        self.books.evict(victims)
        if reclaims:
            self.books.reclaim(list(victims))

    @precondition(lambda self: self.has_idle)
    @rule(which=choice, kept=st.integers(2, 5), wanted=st.one_of(st.none(), st.integers(0, 3)), spare=st.integers(0, 2))
    def thin_out(self, which: int, kept: int, wanted: int | None, spare: int) -> None:
        """One token in `kept` survives, so that blocks can be packed."""
        lanes = pick_some(self.books.idle, which)
        self.books.evict(
            {lane: [p for i, p in enumerate(sorted(self.books.lanes[lane].live)) if i % kept] for lane in lanes}
        )
        self.books.reclaim(lanes, wanted=wanted, spare_cells=spare)

    @precondition(lambda self: bool(self.with_shared_tokens))
    @rule(which=choice, victim=choice, blocks=st.integers(0, 2))
    def evict_shared(self, which: int, victim: int, blocks: int) -> None:
        """One branch loses a token that the others keep, and goes on."""
        lane = pick(self.with_shared_tokens, which)
        self.books.evict({lane: [pick(self.books.shared_positions(lane), victim)]})
        if blocks and self.books.extend({lane: blocks * self.books.block_size}, publish=True) is not None:
            self.books.run_step()

    @precondition(lambda self: bool(self.books.swapped))
    @rule(which=choice, first=choice)
    def evict_on_host(self, which: int, first: int) -> None:
        lane = pick(self.books.swapped, which)
        live = sorted(self.books.lanes[lane].live)
        self.books.evict({lane: live[first % (len(live) + 1) :: 2]})

    @precondition(lambda self: bool(self.books.lanes))
    @rule(which=choice, amount=st.integers(1, 99))
    def measure(self, which: int, amount: int) -> None:
        self.books.measure(pick(list(self.books.lanes), which), amount)

    @precondition(lambda self: self.has_idle)
    @rule(which=choice, source=choice, cell=choice, count=st.integers(0, 12), beside=st.booleans())
    def relocate(self, which: int, source: int, cell: int, count: int, beside: bool) -> None:
        lane = pick(self.books.idle, which)
        rows, cells = self.books.movable(lane)
        count = min(count, len(rows), len(cells))
        rows = (rows + rows)[source % max(1, len(rows)) :][:count]
        cells = (cells + cells)[cell % max(1, len(cells)) :][:count]
        self.books.relocate(lane, rows, cells, beside=beside)

    @precondition(lambda self: self.has_idle)
    @rule(
        which=choice,
        wanted=st.one_of(st.none(), st.integers(0, 4)),
        compact=mostly,
        beside=st.booleans(),
        spare=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    )
    def reclaim(self, which: int, wanted: int | None, compact: bool, beside: bool, spare: list[int]) -> None:
        lanes = pick_some(self.books.idle, which)
        spare_cells = [spare[i % len(spare)] for i in range(len(lanes))]
        self.books.reclaim(lanes, wanted=wanted, compact=compact, beside=beside, spare_cells=spare_cells)

    @precondition(lambda self: bool(self.books.idle))
    @rule(which=choice)
    def trim(self, which: int) -> None:
        self.books.trim(pick_some(self.books.idle, which))

    @precondition(lambda self: bool(self.books.beside))
    @rule(which=choice, num_tokens=st.integers(1, 8))
    def run_beside(self, which: int, num_tokens: int) -> None:
        self.books.run_beside(pick(list(self.books.beside), which), num_tokens)

    @precondition(lambda self: bool(self.finishable))
    @rule(which=choice)
    def finish(self, which: int) -> None:
        self.books.finish(pick(self.finishable, which))

    @precondition(lambda self: self.has_idle)
    @rule(which=choice)
    def swap_out(self, which: int) -> None:
        self.books.swap_out(pick_some(self.books.idle, which))

    @precondition(lambda self: bool(self.books.swapped))
    @rule(which=choice)
    def swap_in(self, which: int) -> None:
        self.books.swap_in(pick_some(self.books.swapped, which))

    @precondition(lambda self: bool(self.unplanned))
    @rule(which=choice)
    def release(self, which: int) -> None:
        self.books.release(pick_some(self.unplanned, which))

    @precondition(lambda self: self.has_forgettable)
    @rule()
    def forget_oldest(self) -> None:
        self.books.forget_oldest()


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=120, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
def test_books_at_length() -> None:
    run_state_machine_as_test(
        BooksMachine,
        settings=settings(max_examples=3000, stateful_step_count=80, suppress_health_check=list(HealthCheck)),
    )
