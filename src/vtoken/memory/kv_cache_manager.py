"""`KVCacheManager`: the face of the books. Who holds which block and which slot lives changes only through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vtoken.base.errors import InvariantError
from vtoken.memory import audit, bits
from vtoken.memory.beside import BesideMoves
from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import EMPTY, BlockState, BlockTable
from vtoken.memory.copy import Copy, CopyKind
from vtoken.memory.lanes import Lanes
from vtoken.memory.prefix_cache import BlockHashes, PrefixCache, PrefixEntry
from vtoken.memory.publisher import Publisher
from vtoken.memory.reclaim import Reclamation
from vtoken.memory.reclaimer import Reclaimer
from vtoken.memory.slot_allocator import Placement, SlotAllocator
from vtoken.memory.stats import MemoryCounters, MemoryUsage, fragmentation
from vtoken.memory.token_table import TokenTable


@dataclass(frozen=True, eq=False)
class Extension:
    """The cells that new tokens got, and what the lanes could read before: snapshots, in the order of the placement."""

    rows: NDArray[np.int32]  # [tokens]
    slots: NDArray[np.int64]  # [tokens]
    positions: NDArray[np.int32]  # [tokens]
    block_tables: NDArray[np.int32]  # [n, entries]
    past_masks: NDArray[np.uint32]  # [n, entries, words] the live tokens without the new ones
    past_live: NDArray[np.int32]  # [n]
    copies: tuple[Copy, ...]  # copies on write, to run before anything is written


class KVCacheManager:
    """The books of one paged KV cache. Numpy only: it orders copies (`Copy`) and never touches a key or a value.

    A *lane* is a sequence's index in all tables. Operations that return copies change the books at once, on the promise
    that the copies run, in the order in which they were returned, before the next forward pass; only moves begun with
    `beside=True` wait for `finish`.

    Args:
        num_blocks: blocks on the device.
        block_size: tokens a block, 4 to 256.
        num_host_blocks: blocks of the host pool that `swap_out` fills.
        enable_prefix_caching: whether full blocks are published and matched.
        columns: statistics kept a token, name -> dtype; they move with their tokens.
        free_order: the order in which fresh blocks are handed out, for tests and pictures.
        reuse_cells: whether new tokens may take the cells of dead ones. Without, as in engines that only mark tokens
            dead, each goes behind the last row used, and a hole is lost until its block returns.
        max_cost_per_block: the most tokens that `reclaim` copies for a block; None = what it takes, which is never
            `block_size` or more.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        columns: Mapping[str, DTypeLike] | None = None,
        free_order: Sequence[int] | None = None,
        reuse_cells: bool = True,
        max_cost_per_block: int | None = None,
    ) -> None:
        if not 4 <= block_size <= 256:
            raise ValueError(f"block_size must be 4 to 256, got {block_size}")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if max_cost_per_block is not None and max_cost_per_block < 0:
            raise ValueError(f"max_cost_per_block must be None or at least 0 tokens, got {max_cost_per_block}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, block_size, free_order)
        self.host_pool = BlockPool(num_host_blocks, block_size)
        self.blocks = BlockTable(block_size)
        self.tokens = TokenTable(self.blocks, columns)
        self.lanes = Lanes(self.blocks, self.tokens)
        self.slots = SlotAllocator(self.pool, self.blocks, self.tokens, reuse_cells=reuse_cells)
        self.prefix = PrefixCache(self.pool)
        self.moves = BesideMoves(self.pool, self.blocks, self.tokens)
        self.counters = MemoryCounters()
        self._reclaimer = Reclaimer(
            self.pool,
            self.blocks,
            self.tokens,
            self.slots,
            self.prefix,
            self.moves,
            self.counters,
            max_cost_per_block,
        )
        self.decisions = self._reclaimer.decisions
        self._publisher = Publisher(self.prefix, self.blocks, self.tokens)

    # --- blocks -------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones that would be forgotten."""
        num_cached = self.prefix.num_cached
        if num_cached and self.moves:
            num_cached -= int((self.pool.pins[self.prefix.cached_blocks] > 0).sum())
        return self.pool.num_free + num_cached

    @property
    def num_held(self) -> int:
        """Blocks that are neither free nor merely cached."""
        return self.pool.num_blocks - self.pool.num_free - self.prefix.num_cached

    def _take(self, count: int) -> NDArray[np.int32]:
        """Rungs 1 and 2 of the pressure ladder: free blocks, then the least recently used cached ones."""
        if self.pool.num_free < count and self.num_available < count:
            raise InvariantError(f"{count} blocks asked for, {self.num_available} are available")
        while self.pool.num_free < count:
            before = self.pool.num_free
            self.prefix.forget_oldest()
            self.counters.blocks_forgotten += self.pool.num_free - before
        self.counters.blocks_taken += count
        return self.pool.take(count)

    def _drop(self, blocks: NDArray[np.int32]) -> None:
        self.prefix.keep(self.pool.drop_refs(blocks))

    # --- lanes --------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """[lanes] whether a sequence has the lane."""
        return self.lanes.is_open

    @property
    def on_host(self) -> NDArray[np.bool_]:
        """[lanes] whether the lane's blocks are those of the host pool."""
        return self.lanes.on_host

    @property
    def used_lanes(self) -> list[int]:
        return self.lanes.used

    # --- admit, extend, fork, release ------------------------------------------------------------------------------

    def match(self, hashes: BlockHashes, max_tokens: int) -> list[PrefixEntry]:
        """The cached blocks a text could start with, at most `max_tokens` tokens of it. Changes nothing."""
        if not self.enable_prefix_caching:
            return []
        return self.prefix.match(hashes, max_tokens // self.block_size)

    def blocks_to_admit(self, num_tokens: int, matched: Sequence[PrefixEntry] = ()) -> int:
        """Blocks that must be available for `admit` to succeed."""
        # A cached block that a copy touches could not be handed out, so using it takes nothing away.
        idle = sum(1 for entry in matched if self.pool.refs[entry.block] == 0 and self.pool.pins[entry.block] == 0)
        return max(0, -(-num_tokens // self.block_size) - len(matched)) + idle

    def admit(self, num_tokens: int, matched: Sequence[PrefixEntry] = ()) -> int | None:
        """Open a lane that holds the matched blocks, and blocks of its own for `num_tokens` tokens in all.

        All or nothing: returns the lane, or None when there are not enough blocks (nothing has changed then).
        Raises ValueError if a matched block was forgotten since `match`.
        """
        if not all(self.prefix.knows(entry) for entry in matched):
            raise ValueError("a matched block was forgotten meanwhile; match again right before admit")
        if self.blocks_to_admit(num_tokens, matched) > self.num_available:
            return None
        num_entries = max(-(-num_tokens // self.block_size), len(matched))
        lane = self.lanes.open(num_entries)
        shared = np.array([entry.block for entry in matched], np.int32)
        self.pool.add_refs(shared)  # before blocks are taken, so that these are not the ones forgotten
        self.prefix.use(shared.tolist())
        self.blocks.ids[lane, : len(shared)] = shared
        self.blocks.ids[lane, len(shared) : num_entries] = self._take(num_entries - len(shared))
        self.blocks.num_entries[lane] = num_entries
        num_cached = len(shared) * self.block_size
        rows = np.arange(num_cached)
        self.tokens.append(np.full(num_cached, lane), rows, rows)
        self._publisher.open(lane, matched)
        if self.enable_prefix_caching:
            self.counters.prefix_query_tokens += num_tokens
            self.counters.prefix_hit_tokens += num_cached
        return lane

    def plan_extend(self, lanes: NDArray[np.int64], counts: NDArray[np.int64]) -> Placement:
        """Where the next `counts[i]` tokens of the distinct `lanes[i]` would go, and how many blocks that takes.

        Both are [n]. Raises ValueError for a lane that is not in use, or on the host.
        """
        self.lanes.require_on_device(lanes)
        return self.slots.place(lanes, counts)

    def extend(self, placement: Placement) -> Extension:
        """Carry out a placement made since the last change. It must not need more blocks than are available."""
        lanes, starts, rows = placement.lanes, placement.starts, placement.rows
        counts = np.diff(starts)
        size, blocks = self.block_size, self.blocks
        if len(placement.fresh):
            self.lanes.ensure(int(placement.fresh[:, 1].max()) + 1)
        taken = self._take(placement.num_blocks)
        copies = self._copy_on_write(placement.copied, taken[len(placement.fresh) :])
        fresh_lanes, fresh_entries = placement.fresh.T
        blocks.ids[fresh_lanes, fresh_entries] = taken[: len(placement.fresh)]
        np.maximum.at(blocks.num_entries, fresh_lanes, (fresh_entries + 1).astype(np.int32))
        self.tokens.forget(fresh_lanes, fresh_entries)

        of_token = np.repeat(lanes, counts)
        written = blocks.ids[of_token, rows // size]
        self.counters.cells_reused += self.tokens.num_used(of_token, rows)
        for block in np.unique(written[self.pool.published[written]]).tolist():
            self.prefix.forget_block(block)  # its content is about to change

        num_entries = int(blocks.num_entries[lanes].max(initial=0))
        block_tables, past_masks = blocks.ids[lanes, :num_entries], blocks.masks[lanes, :num_entries]
        past_live = self.tokens.num_live[lanes]
        first = self.tokens.lengths[lanes].astype(np.int64)
        positions = np.repeat(first - starts[:-1], counts) + np.arange(len(rows))
        self.tokens.append(of_token, rows, positions)
        slots = written.astype(np.int64) * size + rows % size
        return Extension(
            rows.astype(np.int32), slots, positions.astype(np.int32), block_tables, past_masks, past_live, copies
        )

    def _copy_on_write(self, copied: NDArray[np.int64], fresh: NDArray[np.int32]) -> tuple[Copy, ...]:
        """Give each (lane, entry) a block of its own with the lane's live tokens in it."""
        if not len(copied):
            return ()
        lanes, entries = copied.T
        shared = self.blocks.ids[lanes, entries]
        which, offsets = np.nonzero(
            bits.unpack(self.blocks.masks[lanes, entries][:, None], self.block_size)
        )  # only the writer's live rows: the rest of the block is somebody else's
        offsets = offsets.astype(np.int64)
        copy = Copy(
            CopyKind.COPY_ON_WRITE,
            shared[which].astype(np.int64) * self.block_size + offsets,
            fresh[which].astype(np.int64) * self.block_size + offsets,
        )
        self.blocks.ids[lanes, entries] = fresh
        self._drop(shared)
        self.counters.blocks_copied_on_write += len(copied)
        self.counters.tokens_copied_on_write += len(copy)
        return (copy,)

    def fork(self, lane: int) -> int:
        """A second lane over the same blocks. Blocks that the lane holds but does not use yet stay its own.

        Raises ValueError for a lane that is not in use, or on the host.
        """
        self.lanes.require_on_device([lane])
        num_entries = int(self.blocks.num_entries[lane])
        twin = self.lanes.open(num_entries)
        self.moves.drop(lane)  # what it was about to write is shared from now on
        used = bits.occupied(self.blocks.masks[lane, :num_entries])
        shared = self.blocks.ids[lane, :num_entries][used]
        self.pool.add_refs(shared)
        self.blocks.ids[twin, :num_entries][used] = shared
        self.blocks.masks[twin, :num_entries] = self.blocks.masks[lane, :num_entries]
        self.blocks.num_entries[twin] = num_entries
        self.blocks.cut(twin)
        self.tokens.copy_lane(lane, twin)
        self.tokens.cut(twin)
        self._publisher.fork(lane, twin)
        self.counters.forks += 1
        return twin

    def release(self, lanes: Sequence[int]) -> None:
        """Close lanes: their blocks go back, wherever they are. Raises ValueError for a lane that is not in use."""
        if len(set(lanes)) != len(lanes) or not self.is_open[list(lanes)].all():
            raise ValueError(f"lanes {list(lanes)} are not all in use: a lane is released once")
        for lane in lanes:
            self.moves.drop(lane)
            # Freed tail first, so that a prefix outlives its continuations.
            held = self.blocks.held(lane)[::-1]
            if self.on_host[lane]:
                self.host_pool.drop_refs(held)
            else:
                self._drop(held)
            self._publisher.close(lane)
            self.lanes.close(lane)

    # --- prefix: publish, commit, withdraw ---------------------------------------------------------------------------

    def publish(self, lane: int, hashes: BlockHashes) -> None:
        """Enter the lane's full blocks in the prefix index, pending until `commit` or `withdraw`.

        A sequence that has lost a token, and its forks, publish no more: what they computed since lacks that context.
        """
        self.lanes.require_on_device([lane])
        if self.enable_prefix_caching:
            self._publisher.publish(lane, hashes)

    def commit(self) -> None:
        """The step that computes the pending blocks has succeeded."""
        self.prefix.commit_pending()

    def withdraw(self) -> None:
        """The step failed: what it was to compute was never written."""
        self.prefix.withdraw_pending()

    def unpublish(self, lane: int) -> None:
        """Nobody may match the beginning of this lane's text any more: what was computed is not to be trusted."""
        self._publisher.unpublish(lane)

    # --- evict, relocate, reclaim, statistics -----------------------------------------------------------------------

    def evict(self, lanes: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Mark live (lane, row) pairs dead: `lanes` and `rows` are [n]. Logical only: no block changes hands, no cell
        changes content. Raises ValueError, and changes nothing, if a token is dead already or named twice."""
        pairs = lanes.astype(np.int64) * self.tokens.positions.shape[1] + rows
        if not self.blocks.is_live(lanes, rows).all() or len(np.unique(pairs)) != len(pairs):
            raise ValueError("only live tokens can be evicted, and each only once")
        self.tokens.kill(lanes, rows)
        self.counters.tokens_evicted += len(rows)

    def relocate(
        self, lane: int, source_rows: NDArray[np.int64], target_rows: NDArray[np.int64], *, beside: bool = False
    ) -> Copy:
        """Move live tokens into free cells of the same sequence: rows [n] to rows [n].

        Ordered (the default), the map changes at once. With `beside=True` the copy may run while steps go on: both ends
        are pinned, the targets and the source blocks take no new tokens, and the old map stays valid until `finish`.

        Raises ValueError, and changes nothing, for sources that do not live, targets that are no free cells, and blocks
        that others hold or another copy touches.
        """
        lanes = np.full(len(source_rows), lane)
        self.lanes.require_on_device([lane])
        if not self.blocks.is_live(lanes, source_rows).all():
            raise ValueError("only live tokens can be relocated")
        if not len(np.unique(source_rows)) == len(np.unique(target_rows)) == len(source_rows) == len(target_rows):
            raise ValueError("a relocation names each source and each target once")
        if not np.isin(target_rows, self.slots.free_cells(lane)).all():
            raise ValueError("a relocation's targets must be free cells of blocks that the sequence holds alone")
        source_blocks = np.unique(self.blocks.ids[lane, source_rows // self.block_size])
        if (self.pool.refs[source_blocks] > 1).any() or (self.pool.pins[source_blocks] > 0).any():
            raise ValueError("a block that others hold or another copy reads is no source of a relocation")
        return self._reclaimer.relocate(lane, source_rows, target_rows, beside=beside)

    def finish(self, ticket: int, *, copied: bool = True) -> None:
        """A beside-copy has ended: switch the map, unless its plan was dropped, and return the emptied blocks.

        With `copied=False` it failed: its tokens stay where they are, and its cells are free again.
        """
        self._reclaimer.finish(ticket, copied=copied)

    def reclaim(
        self,
        lanes: Sequence[int] | NDArray[np.int64],
        *,
        wanted: int | None = None,
        spare_cells: int | NDArray[np.int64] = 0,
        compact: bool = True,
        beside: bool = False,
        trigger: str = "manual",
    ) -> Reclamation:
        """Give back blocks that the live tokens of some sequences do not need, the cheapest first.

        Blocks in which no token of a lane lives return in any case. If that is not enough, live tokens move together,
        in blocks that nobody else holds and no copy touches, as far as it takes to bring back `wanted` blocks in all;
        None = all that can come back. Lanes with moves under way keep theirs where they are. Leaves a record in
        `decisions`. A block counts as returned when nobody holds it any more.

        Without reuse of cells a lane that is packed at all is packed as a whole, its tokens to the front, so that the
        cells that become free lie behind them; `wanted` only chooses the lanes then.

        Args:
            spare_cells: free cells left to a sequence that is about to write, [n] or the same for all.
            compact: False: only dead blocks return.
            beside: the copies may run while steps go on; the blocks they empty return in `finish`.
            trigger: why, for the record.

        Raises ValueError for a lane that is not in use, on the host or named twice, and for negative numbers.
        """
        which = np.asarray(lanes, np.int64)
        self.lanes.require_on_device(which)
        spare = np.broadcast_to(np.asarray(spare_cells, np.int64), which.shape)
        if len(set(which.tolist())) != len(which):
            raise ValueError(f"lanes {list(lanes)}: a reclaim names each lane once")
        if (wanted is not None and wanted < 0) or (spare < 0).any():
            raise ValueError(f"wanted={wanted} and spare_cells={spare_cells} must not be negative")
        return self._reclaimer.reclaim(
            which, wanted=wanted, spare_cells=spare, compact=compact, beside=beside, trigger=trigger
        )

    def trim(self, lanes: Sequence[int] | NDArray[np.int64]) -> int:
        """Give back the blocks in which some sequences never had a token: they were held for tokens to come, of which
        fewer have come than might have. Returns how many. Not in a step in which these sequences have tokens.

        Raises ValueError for a lane that is not in use, on the host or named twice.
        """
        which = np.asarray(lanes, np.int64)
        self.lanes.require_on_device(which)
        if len(set(which.tolist())) != len(which):
            raise ValueError(f"lanes {list(lanes)}: a trim names each lane once")
        return self._reclaimer.trim(which)

    def fragmentation(self, lanes: Sequence[int] | NDArray[np.int64]) -> float:
        """Share of the used cells of the lanes' blocks in which nothing lives for any of them, tail slack aside.

        A block that several of the lanes hold counts once. 0.0 where no cell is used.
        """
        which = np.asarray(lanes, np.int64)
        self.lanes.require_on_device(which)
        return fragmentation(self, which)

    def add_statistics(self, name: str, lanes: NDArray[np.int32], values: NDArray[np.floating[Any]]) -> None:
        """Add `values` [n, rows] to the column `name` of the distinct `lanes` [n]."""
        self.tokens.add_statistics(name, lanes, values)

    # --- swap -------------------------------------------------------------------------------------------------------

    def swap_out(self, lanes: Sequence[int]) -> Copy | None:
        """Move a group of sequences to the host, block by distinct block, their sharing mirrored.

        Returns None, and changes nothing, when the host pool is too small. Raises ValueError for lanes that are not
        all on the device.
        """
        return self._swap(lanes, self.pool, self.host_pool, CopyKind.SWAP_OUT)

    def swap_in(self, lanes: Sequence[int]) -> Copy | None:
        """Bring a group back. Returns None, and changes nothing, when there are not enough blocks."""
        return self._swap(lanes, self.host_pool, self.pool, CopyKind.SWAP_IN)

    def swap_blocks(self, lanes: Sequence[int]) -> NDArray[np.int32]:
        """The distinct blocks in which tokens of a group live."""
        num_entries = int(self.blocks.num_entries[list(lanes)].max())
        used = bits.occupied(self.blocks.masks[list(lanes), :num_entries])
        return np.unique(self.blocks.ids[list(lanes), :num_entries][used])

    def _swap(self, lanes: Sequence[int], source: BlockPool, target: BlockPool, kind: CopyKind) -> Copy | None:
        leaves = kind is CopyKind.SWAP_OUT
        if any(self.on_host[lane] == leaves or not self.is_open[lane] for lane in lanes) or len(set(lanes)) < len(
            lanes
        ):
            raise ValueError(f"lanes {list(lanes)} are not all on the side they are to leave")
        distinct = self.swap_blocks(lanes)
        if len(distinct) > (target.num_free if leaves else self.num_available):
            return None
        fresh = target.take(len(distinct)) if leaves else self._take(len(distinct))
        target.refs[fresh] = 0  # counted below, once for each lane that holds the block
        for lane in lanes:
            self.moves.drop(lane)
            num_entries = int(self.blocks.num_entries[lane])
            ids = self.blocks.ids[lane, :num_entries]
            held, used = self.blocks.held(lane)[::-1], bits.occupied(self.blocks.masks[lane, :num_entries])
            moved = np.full(num_entries, EMPTY, np.int32)  # blocks that hold nothing yet are not worth a copy
            moved[used] = fresh[np.searchsorted(distinct, ids[used])]
            target.add_refs(moved[used])
            if leaves:
                self._drop(held)
            else:
                source.drop_refs(held)
            ids[:] = moved
            self.blocks.cut(lane)
            self.tokens.cut(lane)
            self.on_host[lane] = leaves
        if leaves:
            self.counters.blocks_swapped_out += len(distinct)
        else:
            self.counters.blocks_swapped_in += len(distinct)
        offsets = np.arange(self.block_size)
        whole = [(ids.astype(np.int64)[:, None] * self.block_size + offsets).reshape(-1) for ids in (distinct, fresh)]
        return Copy(kind, whole[0], whole[1])

    # --- looking in -------------------------------------------------------------------------------------------------

    def table(self, lane: int) -> list[BlockState]:
        """A sequence's blocks, with how far each is filled and how many hold it."""
        pool = self.host_pool if self.on_host[lane] else self.pool
        ids, live = self.blocks.ids[lane], self.blocks.live_counts(lane)
        return [
            BlockState(entry, int(ids[entry]), int(live[entry]), int(pool.refs[ids[entry]]))
            for entry in range(len(live))
            if ids[entry] != EMPTY
        ]

    def usage(self) -> MemoryUsage:
        """What every block and slot of the device pool is used for, right now."""
        return MemoryUsage.of(self)

    def check(self) -> None:
        """Raise InvariantError if the books contradict themselves. Slow: for tests."""
        audit.check(self)
