"""`Publisher`: how far each lane's blocks are entered in the prefix index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vtoken.memory.block_table import BlockTable
from vtoken.memory.prefix_cache import BlockHashes, PrefixCache, PrefixEntry
from vtoken.memory.token_table import TokenTable


@dataclass
class _Chain:
    """The entry a lane stands on, and how many blocks that is from the beginning of its text."""

    end: PrefixEntry | None = None
    length: int = 0
    is_broken: bool = False


class Publisher:
    """One chain of entries a lane. A sequence that has lost a token, and its forks, publish no more: what they computed
    since lacks that context."""

    def __init__(self, prefix: PrefixCache, blocks: BlockTable, tokens: TokenTable) -> None:
        self._prefix = prefix
        self._blocks = blocks
        self._tokens = tokens
        self._chains: dict[int, _Chain] = {}  # of the lanes in use

    def open(self, lane: int, matched: Sequence[PrefixEntry]) -> None:
        """The lane's text begins with the matched entries."""
        self._chains[lane] = _Chain(matched[-1] if matched else None, len(matched))

    def fork(self, lane: int, twin: int) -> None:
        self._chains[twin] = replace(self._chains[lane])

    def close(self, lane: int) -> None:
        del self._chains[lane]

    def publish(self, lane: int, hashes: BlockHashes) -> None:
        """Enter the lane's full blocks, pending."""
        chain = self._chains[lane]
        if chain.is_broken or self._tokens.evicted[lane] or not self._tokens.in_order[lane]:
            return
        num_full = min(int(self._tokens.lengths[lane]) // self._blocks.block_size, len(hashes))
        for entry in range(chain.length, num_full):
            block = int(self._blocks.ids[lane, entry])
            found = self._prefix.publish(hashes.keys[entry], hashes.tokens[entry], block, chain.end)
            if found is None:
                chain.is_broken = True  # nothing after this could be matched
                return
            chain.end = found
            chain.length = entry + 1

    def unpublish(self, lane: int) -> None:
        """Forget the whole chain this lane stands on, what it had matched too: nobody knows where the fault began."""
        chain = self._chains[lane]
        # Entries, not blocks: what it computed may lie in blocks that it gave back or swapped out meanwhile.
        entry = chain.end
        while entry is not None:
            self._prefix.forget(entry)
            entry = entry.parent
        chain.is_broken = True
