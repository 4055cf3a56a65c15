"""`PrefixCache`: full blocks that a later request with the same beginning can use instead of computing them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from vtoken.base.errors import InvariantError
from vtoken.memory.block_pool import BlockPool


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block: a strong hash over its own tokens and, through `parent`, over everything before it."""
    return blake2b(parent + tokens, digest_size=32).digest()


class BlockHashes:
    """The chained hashes of a text's full blocks, made once and extended as the text grows.

    `salt` separates tenants: texts with different salts never share blocks. It is hashed at once and not kept.
    `rope_length` separates texts whose keys are turned differently.
    """

    def __init__(self, block_size: int, salt: str | None = None, rope_length: int | None = None) -> None:
        self.block_size = block_size
        self.keys: list[bytes] = []
        self.tokens: list[bytes] = []  # of each block, to compare on a match
        self._root = chain_hash(b"", b"" if salt is None else b"salt" + salt.encode())
        if rope_length is not None:
            self._root = chain_hash(self._root, b"rope length %d" % rope_length)

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Hash the full blocks of `token_ids[:num_tokens]` that are not hashed yet."""
        size = self.block_size
        for start in range(len(self.keys) * size, num_tokens - size + 1, size):
            tokens = np.asarray(token_ids[start : start + size], dtype="<i4").tobytes()
            self.keys.append(chain_hash(self.keys[-1] if self.keys else self._root, tokens))
            self.tokens.append(tokens)

    def copy(self, num_tokens: int | None = None) -> BlockHashes:
        """For a text that begins alike, with all or the first `num_tokens` tokens, and may go on differently."""
        twin = object.__new__(BlockHashes)
        twin.block_size, twin._root = self.block_size, self._root
        num_blocks = len(self) if num_tokens is None else num_tokens // self.block_size
        twin.keys, twin.tokens = self.keys[:num_blocks], self.tokens[:num_blocks]
        return twin


@dataclass(eq=False, slots=True)
class PrefixEntry:
    """One published block. Its place in the chain is its `parent`, compared by identity."""

    key: bytes
    tokens: bytes
    block: int
    parent: PrefixEntry | None
    children: set[PrefixEntry] = field(default_factory=set)


class PrefixCache:
    """The index of published blocks: publish, match, forget.

    Entries are pending from the plan that computes them to the result of its step, so that sequences of the same plan
    can match them; `withdraw_pending` undoes them when the step fails.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[bytes, PrefixEntry] = {}
        self._of_block: dict[int, PrefixEntry] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # blocks nobody holds, least recently used first
        self._pending: list[PrefixEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def cached_blocks(self) -> list[int]:
        """Blocks that only this index keeps, the next one to be forgotten first."""
        return list(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def match(self, hashes: BlockHashes, max_blocks: int) -> list[PrefixEntry]:
        """The entries of the longest known beginning, at most `max_blocks`. Changes nothing."""
        found: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        for key, tokens in zip(hashes.keys[:max_blocks], hashes.tokens, strict=False):
            entry = self._entries.get(key)
            # A hash is only a hint: the tokens and the chain decide, so a collision cannot hand out another's KV.
            if entry is None or entry.tokens != tokens or entry.parent is not parent:
                break
            found.append(entry)
            parent = entry
        return found

    def knows(self, entry: PrefixEntry) -> bool:
        """Whether the entry has not been forgotten."""
        return self._of_block.get(entry.block) is entry

    def publish(self, key: bytes, tokens: bytes, block: int, parent: PrefixEntry | None) -> PrefixEntry | None:
        """Enter a full block, pending. Returns the entry that now stands for this beginning (another block's, if that
        came first), or None when it cannot be entered: the hash is taken by other tokens or the parent is gone."""
        known = self._entries.get(key)
        if known is not None:
            return known if known.tokens == tokens and known.parent is parent else None
        if parent is not None and not self.knows(parent):
            return None
        entry = PrefixEntry(key, tokens, block, parent)
        self._entries[key] = self._of_block[block] = entry
        if parent is not None:
            parent.children.add(entry)
        self._pool.published[block] = True
        self._pending.append(entry)
        return entry

    def commit_pending(self) -> None:
        self._pending.clear()

    def withdraw_pending(self) -> None:
        for entry in self._pending:
            self.forget(entry)
        self._pending.clear()

    def keep(self, blocks: NDArray[np.int32]) -> None:
        """The last holder of these published blocks is gone; they are the most recently used from now on."""
        for block in blocks.tolist():
            self._cached[block] = None

    def keep_as_oldest(self, blocks: NDArray[np.int32]) -> None:
        """As `keep`, but these are the first to be forgotten."""
        for block in blocks.tolist():
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)

    def use(self, blocks: Sequence[int]) -> None:
        """These blocks have a holder again."""
        for block in blocks:
            self._cached.pop(block, None)

    def forget_oldest(self) -> None:
        """Forget the least recently used block that no copy touches, and what can only be reached through it."""
        block = next(b for b in self._cached if not self._pool.pins[b])
        self.forget(self._of_block[block])

    def forget_block(self, block: int) -> None:
        """Drop the block's entry, whoever holds the block; for one that is not published nothing happens."""
        entry = self._of_block.get(block)
        if entry is not None:
            self.forget(entry)

    def forget(self, entry: PrefixEntry) -> None:
        """Drop an entry, and with it what can only be reached through it; one that is gone already stays gone."""
        if not self.knows(entry):
            return  # forgotten before
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        branch = [entry]
        while branch:  # a match stops at the first gap, so everything below the entry is out of reach too
            gone = branch.pop()
            branch.extend(gone.children)
            gone.children.clear()
            del self._entries[gone.key], self._of_block[gone.block]
            self._cached.pop(gone.block, None)
            self._pool.unpublish(gone.block)

    def check(self) -> None:
        pool = self._pool
        if set(np.flatnonzero(pool.published).tolist()) != set(self._of_block):
            raise InvariantError("published blocks and prefix entries differ")
        if set(np.flatnonzero(pool.published & (pool.refs == 0)).tolist()) != set(self._cached):
            raise InvariantError("cached blocks and the list of those to be forgotten differ")
        for block, entry in self._of_block.items():
            if entry.block != block or self._entries.get(entry.key) is not entry:
                raise InvariantError(f"the prefix entry of block {block} is filed wrongly")
            if entry.parent is not None and (
                self._of_block.get(entry.parent.block) is not entry.parent or entry not in entry.parent.children
            ):
                raise InvariantError(f"the prefix entry of block {block} cannot be reached")

    @property
    def num_pending(self) -> int:
        return len(self._pending)
