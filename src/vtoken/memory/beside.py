"""`BesideMoves`: relocations whose copy runs while steps go on. Always copied, then mapped, then reused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.base.errors import InvariantError
from vtoken.memory import bits
from vtoken.memory.block_pool import BlockPool
from vtoken.memory.block_table import BlockTable
from vtoken.memory.copy import Copy, CopyKind
from vtoken.memory.token_table import TokenTable


@dataclass(eq=False)
class _Move:
    lane: int | None  # None: the plan was dropped; the copy still has to end before its cells are free
    source_rows: NDArray[np.int64]
    target_rows: NDArray[np.int64]
    source_blocks: NDArray[np.int64]
    target_blocks: NDArray[np.int64]
    target_cells: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]  # (block, word, bit)


class BesideMoves:
    """The moves under way. Each pins its blocks, closes its source blocks and claims its target cells until it ends."""

    def __init__(self, pool: BlockPool, blocks: BlockTable, tokens: TokenTable) -> None:
        self._pool = pool
        self._blocks = blocks
        self._tokens = tokens
        self._moves: dict[int, _Move] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def tickets(self) -> list[int]:
        return list(self._moves)

    def is_pending(self, lane: int) -> bool:
        return any(move.lane == lane for move in self._moves.values())

    def begin(
        self,
        lane: int,
        source_rows: NDArray[np.int64],
        target_rows: NDArray[np.int64],
        sources: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> Copy:
        """Claim the slots and order the copy. The map stays as it is."""
        size, pool = self._pool.block_size, self._pool
        offsets = targets % size
        cells = (targets // size, offsets // bits.WORD, np.uint32(1) << (offsets % bits.WORD).astype(np.uint32))
        move = _Move(lane, source_rows, target_rows, np.unique(sources // size), np.unique(targets // size), cells)
        pool.pin(move.source_blocks)
        pool.pin(move.target_blocks)
        pool.closed[move.source_blocks] = self._blocks.full
        np.bitwise_or.at(pool.closed, cells[:2], cells[2])
        ticket = self._next_ticket
        self._next_ticket += 1
        self._moves[ticket] = move
        return Copy(CopyKind.RELOCATE, sources, targets, ticket)

    def drop(self, lane: int) -> None:
        """The lane ends, forks or leaves: its moves will change no map, but keep their cells until they have ended."""
        for move in self._moves.values():
            if move.lane == lane:
                move.lane = None

    def finish(self, ticket: int, *, copied: bool = True) -> int | None:
        """The copy has ended: free the claim and, if it did `copied` and was not dropped, switch the map. Returns the
        lane moved."""
        move = self._moves.pop(ticket)
        self._pool.closed[move.source_blocks] = 0
        blocks, words, cell_bits = move.target_cells
        np.bitwise_and.at(self._pool.closed, (blocks, words), ~cell_bits)
        self._pool.unpin(move.source_blocks)
        self._pool.unpin(move.target_blocks)
        if move.lane is None or not copied:
            return None
        # Tokens that died meanwhile stay dead; no other token can have taken their closed cells.
        alive = self._blocks.is_live(np.full(len(move.source_rows), move.lane), move.source_rows)
        self._tokens.move(move.lane, move.source_rows[alive], move.target_rows[alive])
        return move.lane

    def claimed(self) -> NDArray[np.uint32]:
        """[blocks, words] the cells that copies under way write."""
        cells = np.zeros_like(self._pool.closed)
        for move in self._moves.values():
            np.bitwise_or.at(cells, move.target_cells[:2], move.target_cells[2])
        return cells

    def check(self) -> None:
        """Raise InvariantError unless pins, closed cells and the lanes' maps are as the moves under way need them."""
        pool, size = self._pool, self._pool.block_size
        pins, closed = np.zeros_like(pool.pins), self.claimed()
        for ticket, move in self._moves.items():
            pins[move.source_blocks] += 1
            pins[move.target_blocks] += 1
            closed[move.source_blocks] = self._blocks.full
            if move.lane is None:
                continue
            ids, lanes = self._blocks.ids[move.lane], np.full(len(move.target_rows), move.lane)
            # Invariant: until a move ends or is dropped, its rows lie where they lay when the copy was ordered.
            if not np.isin(ids[move.source_rows // size], move.source_blocks).all():
                raise InvariantError(f"move {ticket}: a source row lies in another block than the copy reads")
            if (ids[move.target_rows // size] != move.target_cells[0]).any():
                raise InvariantError(f"move {ticket}: a target row lies in another block than the copy writes")
            if self._blocks.is_live(lanes, move.target_rows).any():
                raise InvariantError(f"move {ticket}: a target is mapped before the copy has ended")
            if (pool.refs[move.target_blocks] != 1).any() or pool.published[move.target_blocks].any():
                raise InvariantError(f"move {ticket}: the copy writes a block that others may read")
        if (pins != pool.pins).any():
            raise InvariantError("a block is pinned by no move under way, or not pinned by one")
        if (closed != pool.closed).any():
            raise InvariantError("a cell is closed by no move under way, or open though one needs it")
