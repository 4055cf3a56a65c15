"""`BooksDriver`: every operation of the books on real tables, a shadow store and a plain model at once.

The state machine, the scripted tests and the planted bugs all go through it. After each operation it holds three
against each other: the books' own `check()`, the shadow store (does each live token read the value that was written for
its position?), and the model (which positions live, what was measured about them, how they died).

Time runs as in the engine. Between two steps the books change and copies are ordered; `extend` gives new tokens their
cells, which are written only when `run_step` runs the forward pass, after the ordered copies. A lane whose tokens are
planned but not written is busy: as in the scheduler, it is not moved, evicted from or extended until the step has run.
A beside-copy runs, token by token, whenever the test says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.memory.model import (
    COLUMN,
    ModelLane,
    array,
    expect,
    fingerprint,
    next_value,
    pure_values,
    whole_text,
)
from tests.memory.shadow import POISON, ShadowStore
from tests.memory.watch import verify_index, verify_lane, verify_usage
from vtoken.memory import bits
from vtoken.memory.block_table import BlockState
from vtoken.memory.copy import Copy
from vtoken.memory.kv_cache_manager import Extension, KVCacheManager
from vtoken.memory.prefix_cache import BlockHashes, PrefixEntry


@dataclass(frozen=True)
class _Slice:
    """One lane's part of the step in the making."""

    lane: int
    positions: range
    slots: NDArray[np.int64]
    past_slots: NDArray[np.int64]  # as the plan's snapshot has it
    past_values: list[int]


@dataclass
class _BesideCopy:
    copy: Copy
    num_run: int = 0  # tokens copied so far


class BooksDriver:
    """`check_books` and `check_shadow` say which of the watchmen look after each operation."""

    def __init__(
        self,
        block_size: int = 4,
        num_blocks: int = 16,
        num_host_blocks: int = 8,
        *,
        free_order: Sequence[int] | None = None,
        enable_prefix_caching: bool = True,
        reuse_cells: bool = True,
        check_books: bool = True,
        check_shadow: bool = True,
    ) -> None:
        self.block_size = block_size
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
            columns={COLUMN: np.float64},
            free_order=free_order,
            reuse_cells=reuse_cells,
        )
        self.store = ShadowStore(num_blocks, num_host_blocks, block_size)
        self.lanes: dict[int, ModelLane] = {}
        self.slices: list[_Slice] = []
        self.copies: list[Copy] = []  # ordered ones of the step in the making, those already run included
        self.touched: set[int] = set()  # lanes that depend on the step in the making
        self.beside: dict[int, _BesideCopy] = {}
        self.check_books, self.check_shadow = check_books, check_shadow
        self._published: dict[PrefixEntry, list[int]] = {}  # what must lie in its block
        self._num_unique = 0

    # --- what a test may ask -------------------------------------------------------------------------------------

    def is_busy(self, lane: int) -> bool:
        return bool(self.lanes[lane].unwritten)

    @property
    def idle(self) -> list[int]:
        """Lanes on the device that are in no step in the making."""
        return [lane for lane in self.lanes if not self.manager.on_host[lane] and not self.is_busy(lane)]

    @property
    def swapped(self) -> list[int]:
        return [lane for lane in self.lanes if self.manager.on_host[lane]]

    def lane_of_ticket(self, ticket: int) -> int | None:
        return self.manager.moves._moves[ticket].lane

    def shared_positions(self, lane: int) -> list[int]:
        """Live positions in blocks that other lanes hold too."""
        rows, positions = self.manager.tokens.live(lane)
        ids = self.manager.blocks.ids[lane, rows // self.block_size]
        return positions[self.manager.pool.refs[ids] > 1].tolist()

    def blocks_of(self, lane: int) -> list[int]:
        return self.manager.blocks.held(lane).tolist()

    def rows_of(self, lane: int, positions: Iterable[int]) -> NDArray[np.int64]:
        return array(*(self.manager.tokens.row_of(lane, p) for p in positions))

    # --- operations ------------------------------------------------------------------------------------------------

    def hashes(self, text: Sequence[int], salt: int = 0) -> BlockHashes:
        hashes = BlockHashes(self.block_size, f"tenant {salt}" if salt else None)
        hashes.extend(text, len(text))
        return hashes

    def admit(
        self, text: Sequence[int], *, salt: int = 0, match: bool = True, num_tokens: int | None = None
    ) -> int | None:
        """Open a lane for a text, by default with blocks for all of it. Computes nothing yet."""
        manager, size = self.manager, self.block_size
        hashes = self.hashes(text, salt)
        matched = manager.match(hashes, max(0, len(text) - 1)) if match else []
        if match and manager.enable_prefix_caching:
            self._check_match(hashes, matched, max(0, len(text) - 1))
        goal = max(len(text) if num_tokens is None else num_tokens, len(matched) * size)
        needed, available = manager.blocks_to_admit(goal, matched), manager.num_available
        before = fingerprint(manager)
        lane = manager.admit(goal, matched)
        if lane is None:
            expect(needed > available, "admission was refused although there were blocks enough")
            expect(fingerprint(manager) == before, "a refused admission changed the books")
            return None
        expect(lane not in self.lanes, f"lane {lane} was given to two sequences")
        expect(manager.num_available == available - needed, "admission took another number of blocks than it said")
        num_cached = len(matched) * size
        model = ModelLane(list(text), salt, self.hashes(text[:0], salt), pure_values(salt, text[:num_cached]))
        model.live = set(range(num_cached))
        model.mass = dict.fromkeys(model.live, 0)
        model.num_matched = len(matched)
        model.context = model.values[-1] if model.values else -2 - salt
        self.lanes[lane] = model
        pending = {id(entry) for entry in manager.prefix._pending}
        planned = {int(slot) for piece in self.slices for slot in piece.slots}
        for i, entry in enumerate(matched):
            if id(entry) in pending:
                self.touched.add(lane)
                model.unwritten |= {i * size + k for k in range(size) if entry.block * size + k in planned}
        self._done()
        return lane

    def _check_match(self, hashes: BlockHashes, matched: list[PrefixEntry], max_tokens: int) -> None:
        """As many blocks as a plain look at the index finds, and the last token is left to compute."""
        known = self.manager.prefix._entries
        longest = 0
        while longest < min(len(hashes), max_tokens // self.block_size):
            entry = known.get(hashes.keys[longest])
            if entry is None or whole_text(entry) != hashes.tokens[: longest + 1]:
                break
            longest += 1
        expect(len(matched) == longest, f"{len(matched)} blocks matched, {longest} could be")
        end = matched[-1] if matched else None
        expect(whole_text(end) == hashes.tokens[:longest], "a match is not the text's beginning")

    def extend(self, counts: dict[int, int], *, publish: bool = False) -> Extension | None:
        """Plan the next tokens of some lanes. Returns None, and changes nothing, if blocks are short."""
        manager, size = self.manager, self.block_size
        lanes = np.array(list(counts), np.int64)
        before = fingerprint(manager)
        placement = manager.plan_extend(lanes, np.array(list(counts.values()), np.int64))
        expect(fingerprint(manager) == before, "planning an extension changed the books")
        available = manager.num_available
        if placement.num_blocks > available:
            return None
        pasts = {lane: self._past(lane) for lane in counts}
        num_rows = manager.tokens.num_rows[lanes]
        extension = manager.extend(placement)
        expect(manager.num_available == available - placement.num_blocks, "another number of blocks was taken")
        self._order(*extension.copies)
        starts = placement.starts
        for i, (lane, count) in enumerate(counts.items()):
            model, first = self.lanes[lane], len(self.lanes[lane].values)
            while len(model.text) < first + count:
                model.text.append((model.context + lane + len(model.text)) % 2)
            for position in range(first, first + count):
                model.context = next_value(model.context, model.text[position])
                model.values.append(model.context)
                model.mass[position] = 0
            new = set(range(first, first + count))
            model.live |= new
            model.unwritten |= new
            part = slice(int(starts[i]), int(starts[i + 1]))
            expect(extension.positions[part].tolist() == sorted(new), "new tokens got the wrong positions")
            expect(not manager.tokens.columns[COLUMN][lane, extension.rows[part]].any(), "statistics start at zero")
            is_behind = bool((extension.rows[part] >= num_rows[i]).all())
            expect(manager.slots.reuse_cells or is_behind, "a token took the cell of a dead one")
            rows, values = pasts[lane]
            table, mask = extension.block_tables[i], extension.past_masks[i]
            expect(np.array_equal(np.flatnonzero(bits.unpack(mask, size)), rows), "the past mask is not the past")
            expect(extension.past_live[i] == len(rows), "the count of past tokens is not that of the mask")
            past_slots = table[rows // size].astype(np.int64) * size + rows % size
            if count:
                self.slices.append(_Slice(lane, range(first, first + count), extension.slots[part], past_slots, values))
                self.touched.add(lane)
            if publish:
                self._publish(lane)
        self._done()
        return extension

    def _past(self, lane: int) -> tuple[NDArray[np.int64], list[int]]:
        rows, positions = self.manager.tokens.live(lane)
        by_row = np.argsort(rows)
        return rows[by_row], [self.lanes[lane].values[p] for p in positions[by_row].tolist()]

    def run_step(self, *, fails: bool = False) -> None:
        """The step in the making runs: its new tokens are written, or nothing is known about what it did."""
        manager = self.manager
        if fails:
            manager.withdraw()
            for copy in self.copies:
                self.store.spoil(copy)
            for piece in self.slices:
                self.store.write(piece.slots, [POISON] * len(piece.slots))
            lost = sorted(lane for lane in self.touched if lane in self.lanes)
            self._finish_step()
            for lane in lost:
                del self.lanes[lane]
            manager.release(lost)
        else:
            written = np.concatenate([array(), *(piece.slots for piece in self.slices)])
            expect(len(np.unique(written)) == len(written), "two new tokens share a cell")
            for piece in self.slices:
                values = [self.lanes[piece.lane].values[p] for p in piece.positions]
                self.store.write(piece.slots, values)
            for piece in self.slices if self.check_shadow else ():
                read = self.store.device[piece.past_slots].tolist()
                expect(read == piece.past_values, f"lane {piece.lane} attended to a past that is not its own")
            self._finish_step()
            manager.commit()
        self._done()

    def _finish_step(self) -> None:
        for model in self.lanes.values():
            model.unwritten.clear()
        self.slices, self.copies, self.touched = [], [], set()

    def compute(self, text: Sequence[int], *, salt: int = 0, publish: bool = True, match: bool = True) -> int:
        """Admit a text and compute all of it in a step of its own."""
        lane = self.admit(text, salt=salt, match=match)
        assert lane is not None, "the test's pool is too small"
        self.grow({lane: len(text) - len(self.lanes[lane].values)}, publish=publish)
        return lane

    def grow(self, counts: dict[int, int], *, publish: bool = False) -> Extension:
        """Extend and run the step."""
        extension = self.extend(counts, publish=publish)
        assert extension is not None, "the test's pool is too small"
        self.run_step()
        return extension

    def publish(self, lane: int) -> None:
        self._publish(lane)
        if self.manager.prefix.num_pending:
            self.touched.add(lane)
        self._done()

    def _publish(self, lane: int) -> None:
        model = self.lanes[lane]
        model.hashes.extend(model.text, len(model.values))
        self.manager.publish(lane, model.hashes)
        size, ids = self.block_size, self.manager.blocks.ids[lane]
        values: list[int] = []
        for i in range(model.num_matched, min(len(model.hashes), len(ids))):
            entry = self.manager.prefix._of_block.get(int(ids[i]))
            if entry is not None and entry not in self._published:
                values = values or pure_values(model.salt, model.text[: len(model.values)])
                self._published[entry] = values[i * size : (i + 1) * size]
                model.entries.append(entry)

    def unpublish(self, lane: int) -> None:
        self.manager.unpublish(lane)
        is_known = [self.manager.prefix.knows(entry) for entry in self.lanes[lane].entries]
        expect(not any(is_known), "an unpublished lane can still be matched")
        self._done()

    def fork(self, lane: int) -> int:
        before = self.manager.num_available
        twin = self.manager.fork(lane)
        expect(self.manager.num_available == before, "a fork takes no blocks")
        expect(twin not in self.lanes, f"lane {twin} was given to two sequences")
        self.lanes[twin] = self.lanes[lane].fork()
        if lane in self.touched:
            self.touched.add(twin)
        self._done()
        return twin

    def evict(self, victims: dict[int, Sequence[int]]) -> None:
        """Kill positions of lanes. Logical: no pool may notice."""
        manager = self.manager
        pools = fingerprint(manager)[0]
        lanes = np.array([lane for lane, positions in victims.items() for _ in positions], np.int64)
        rows = np.concatenate([array(), *(self.rows_of(lane, positions) for lane, positions in victims.items())])
        manager.evict(lanes, rows)
        expect(fingerprint(manager)[0] == pools, "an eviction changed a pool")
        for lane, positions in victims.items():
            model = self.lanes[lane]
            for position in positions:
                model.live.remove(position)
                del model.mass[position]
                model.deaths[position] = len(model.values)
            if positions:  # what is computed from here on lacks some context: it is like nothing else
                self._num_unique += 1
                model.context = next_value(-1, self._num_unique)
        self._done()

    def measure(self, lane: int, amount: int) -> None:
        """Add to the statistics of a lane, to each token its own."""
        model = self.lanes[lane]
        for position in model.live:
            model.mass[position] += amount + position
        rows, positions = self.manager.tokens.live(lane)
        self.manager.tokens.columns[COLUMN][lane, rows] += amount + positions
        self._done()

    def relocate(
        self, lane: int, source_rows: Sequence[int], target_rows: Sequence[int], *, beside: bool = False
    ) -> Copy:
        copy = self.manager.relocate(lane, array(*source_rows), array(*target_rows), beside=beside)
        self._order(copy)
        self.touched.add(lane)
        self._done()
        return copy

    def movable(self, lane: int) -> tuple[list[int], list[int]]:
        """(rows that may be a relocation's sources, cells that may be its targets)."""
        pool, blocks = self.manager.pool, self.manager.blocks
        rows = blocks.live_rows(lane)
        ids = blocks.ids[lane, rows // self.block_size]
        own = (pool.refs[ids] == 1) & (pool.pins[ids] == 0)
        return rows[own].tolist(), self.manager.slots.free_cells(lane).tolist()

    def trim(self, lanes: Sequence[int]) -> int:
        """Blocks in which nothing ever lay return, all but those that a copy beside the steps touches."""
        manager, size = self.manager, self.block_size
        expected = 0
        for lane in lanes:
            held = manager.blocks.ids[lane, : manager.blocks.num_entries[lane]]
            unused = [b for e, b in enumerate(held.tolist()) if b >= 0 and e * size >= manager.tokens.num_rows[lane]]
            expected += sum(not manager.pool.pins[block] for block in unused)
        before = manager.num_available
        expect(manager.trim(lanes) == expected, "a trim returned another number of blocks")
        expect(manager.num_available - before == expected, "blocks returned and blocks reported differ")
        self.touched.update(lanes)
        self._done()
        return expected

    def reclaim(
        self,
        lanes: int | Sequence[int],
        *,
        wanted: int | None = None,
        compact: bool = True,
        beside: bool = False,
        spare_cells: int | Sequence[int] = 0,
    ) -> int:
        """Returns the blocks that came back at once."""
        manager, size, pool = self.manager, self.block_size, self.manager.pool
        lanes = [lanes] if isinstance(lanes, int) else list(lanes)
        spare = [spare_cells] * len(lanes) if isinstance(spare_cells, int) else list(spare_cells)
        used = {lane: self._used(lane) for lane in lanes}
        let_go = Counter(state.block for lane in lanes for state in used[lane] if not state.filled)
        num_dead = sum(bool(pool.refs[block] == count) for block, count in let_go.items())
        # What each lane could give by packing: the live tokens of its emptiest blocks.
        prices: dict[int, list[int]] = {}
        own_blocks: dict[int, list[int]] = {}  # before, those in which something lives
        for lane, num_spare in zip(lanes, spare, strict=True):
            states = [s for s in used[lane] if s.filled and pool.refs[s.block] - let_go[s.block] == 1]
            own = sorted(s.filled for s in states)
            fewest = -(-(sum(own) + num_spare) // size)
            can_pack = compact and not any(self.lane_of_ticket(ticket) == lane for ticket in self.beside)
            prices[lane] = own[: max(0, len(own) - fewest)] if can_pack else []
            own_blocks[lane] = [s.block for s in states]
        cheapest = sorted(price for prices_of_lane in prices.values() for price in prices_of_lane)
        cheapest = cheapest[: None if wanted is None else max(0, wanted - num_dead)]

        before = manager.num_available
        found = manager.reclaim(lanes, wanted=wanted, compact=compact, beside=beside, spare_cells=np.array(spare))
        expect(manager.num_available - before == found.num_blocks, "blocks returned and blocks reported differ")
        for lane, copy in found.copies:
            self._order(copy)
            self.touched.add(lane)
        self._done()
        packed = [lane for lane, _ in found.copies]
        num_copied = sum(len(copy) for _, copy in found.copies)
        num_packed = len(cheapest)
        if manager.slots.reuse_cells:
            # Goal 1: as many blocks as were asked for and can come back, and not one copy too many.
            expect(num_copied == sum(cheapest), f"{num_copied} tokens were copied, {sum(cheapest)} are enough")
        else:
            expect(sum(len(prices[lane]) for lane in packed) >= len(cheapest), "fewer blocks than there could be")
            num_packed = sum(len(prices[lane]) for lane in packed)
            for lane in packed if not beside else ():
                num_packed += self._num_useless(lane, own_blocks[lane], len(prices[lane]))
        if not beside:
            expect(found.num_blocks == num_dead + num_packed, f"{found.num_blocks} blocks, not {num_dead + num_packed}")
        for lane, num_spare in zip(lanes, spare, strict=True):
            expect(beside or not any(not s.filled for s in self._used(lane)), f"lane {lane} still holds a dead block")
            if lane in packed and not beside:
                self._check_packed(lane, num_spare)
        return found.num_blocks

    def _num_useless(self, lane: int, own: list[int], num_given: int) -> int:
        """Blocks that a lane packed to the front gave beyond its `num_given`: left for tokens to come, they would have
        lain before live tokens, where none can come."""
        manager = self.manager
        held = manager.blocks.held(lane)
        num_useless = len(own) - len(np.intersect1d(own, held)) - num_given
        last = manager.blocks.ids[lane, manager.blocks.live_rows(lane)[-1] // self.block_size]
        can_come = last in own and not manager.pool.pins[held].any()
        expect(num_useless >= 0, f"lane {lane} kept {-num_useless} blocks too many")
        expect(not num_useless or not can_come, f"lane {lane} was not left the cells that it needs")
        return num_useless

    def _check_packed(self, lane: int, spare_cells: int) -> None:
        """A lane whose tokens have just moved together has the cells it needs next."""
        manager = self.manager
        used = manager.slots.free_cells(lane)
        if manager.slots.reuse_cells:
            held = [state.entry for state in self._used(lane)]
            num_free = sum(int(cell) // self.block_size in held for cell in used)
            expect(num_free >= spare_cells, f"lane {lane} was left {num_free} free cells, it needs {spare_cells}")
        elif not manager.pool.pins[manager.blocks.held(lane)].any():
            last = manager.blocks.live_rows(lane)[-1]
            expect(manager.tokens.num_rows[lane] == last + 1, "the cells behind the last token are no tail slack")

    def _used(self, lane: int) -> list[BlockState]:
        """The blocks of a lane that have used rows and that no copy touches."""
        pool, num_rows = self.manager.pool, self.manager.tokens.num_rows[lane]
        states = self.manager.table(lane)
        return [s for s in states if not pool.pins[s.block] and s.entry * self.block_size < num_rows]

    def run_beside(self, ticket: int, num_tokens: int | None = None) -> None:
        """The next tokens of a beside-copy are copied, by default all that are left."""
        move = self.beside[ticket]
        end = len(move.copy) if num_tokens is None else min(len(move.copy), move.num_run + num_tokens)
        self.store.run(move.copy, slice(move.num_run, end))
        move.num_run = end
        self._done()

    def finish(self, ticket: int) -> None:
        """The beside-copy ends: whatever is left of it runs now, then the books hear of it."""
        self.run_beside(ticket)
        del self.beside[ticket]
        self.manager.finish(ticket)
        self._done()

    def swap_out(self, lanes: Sequence[int]) -> bool:
        return self._swap(lanes, leaves=True)

    def swap_in(self, lanes: Sequence[int]) -> bool:
        return self._swap(lanes, leaves=False)

    def _swap(self, lanes: Sequence[int], *, leaves: bool) -> bool:
        manager, before = self.manager, fingerprint(self.manager)
        needed = len(manager.swap_blocks(lanes))
        available = manager.host_pool.num_free if leaves else manager.num_available
        copy = (manager.swap_out if leaves else manager.swap_in)(lanes)
        expect((copy is None) == (needed > available), "a swap was refused or done against the count of blocks")
        if copy is None:
            expect(fingerprint(manager) == before, "a refused swap changed the books")
            return False
        expect(len(copy) == needed * self.block_size, "each distinct block is copied once")
        self._order(copy)
        self.touched.update(lanes)
        self._done()
        return True

    def release(self, lanes: Sequence[int]) -> None:
        self.manager.release(lanes)
        for lane in lanes:
            del self.lanes[lane]
            self.touched.discard(lane)
        self._done()

    def forget_oldest(self) -> None:
        before = self.manager.num_available
        self.manager.prefix.forget_oldest()
        expect(self.manager.num_available == before, "forgetting only changes what kind of available a block is")
        self._done()

    def finish_all(self) -> None:
        """Everybody leaves and every copy ends: every block must be free or cached, and free once it is forgotten."""
        if self.slices or self.copies:
            self.run_step()
        self.release(list(self.lanes))
        for ticket in list(self.beside):
            self.finish(ticket)
        pool, prefix = self.manager.pool, self.manager.prefix
        expect(not pool.refs.any() and not pool.pins.any(), "a block is still held though nobody is there")
        expect(pool.num_free + prefix.num_cached == pool.num_blocks, "a block is lost")
        expect(self.manager.host_pool.num_free == self.manager.host_pool.num_blocks, "a host block is lost")
        usage = self.manager.usage()
        expect(usage.live_tokens == usage.held_blocks == usage.pinned_blocks == 0, "usage counts what is not there")
        while prefix.num_cached:
            self.forget_oldest()
        expect(pool.num_free == pool.num_blocks and not len(prefix), "a cached block did not come back")

    # --- watchmen ----------------------------------------------------------------------------------------------------

    def _order(self, *copies: Copy) -> None:
        for copy in copies:
            if copy.ticket is None:
                self.store.run(copy)
                self.copies.append(copy)
            else:
                self.beside[copy.ticket] = _BesideCopy(copy)

    def _done(self) -> None:
        """After each operation."""
        if self.check_books:
            self.manager.check()
        self.store.poison_free(self.manager)
        if self.check_shadow:
            self.verify()

    def verify(self) -> None:
        """Each live token reads its own value and has its own statistics; each published block holds its text."""
        expect(sorted(self.lanes) == self.manager.used_lanes, "lanes in use and lanes of the model differ")
        for lane, model in self.lanes.items():
            verify_lane(self.manager, self.store, lane, model)
        verify_index(self.manager, self.store, self._published)
        verify_usage(self.manager)
