"""What the books should hold, in plain Python, and how a test says that they do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.prefix_cache import BlockHashes, PrefixEntry

COLUMN = "mass"


class BooksFault(AssertionError):
    """What the shadow store or the model found wrong; the books' own complaint is an `InvariantError`."""


def expect(holds: object, message: str) -> None:
    """As `assert`, but planted-bug tests can tell it from a slip of their own."""
    if not holds:
        raise BooksFault(message)


def array(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def next_value(context: int, token: int) -> int:
    """The KV of a token: a function of the token and of all that was read to compute it."""
    return hash((context, token)) & (2**62 - 1)  # tuples of ints hash alike in every process


def pure_values(salt: int, tokens: Iterable[int]) -> list[int]:
    """The KV of a text that never lost a token."""
    values, context = [], -2 - salt
    for token in tokens:
        context = next_value(context, token)
        values.append(context)
    return values


def whole_text(entry: PrefixEntry | None) -> list[bytes]:
    """The tokens of an entry's block and of all before it."""
    return [] if entry is None else [*whole_text(entry.parent), entry.tokens]


@dataclass
class ModelLane:
    """What a sequence should look like, in plain Python."""

    text: list[int]
    salt: int
    hashes: BlockHashes
    values: list[int] = field(default_factory=list)  # of every position that has a row
    live: set[int] = field(default_factory=set)
    deaths: dict[int, int] = field(default_factory=dict)
    mass: dict[int, int] = field(default_factory=dict)  # the statistics column, of live positions
    unwritten: set[int] = field(default_factory=set)  # planned, in a step that has not run
    context: int = 0
    num_matched: int = 0  # blocks that it found cached
    entries: list[PrefixEntry] = field(default_factory=list)  # under which its own blocks were published

    def fork(self) -> ModelLane:
        own = {name: value.copy() for name, value in vars(self).items() if not isinstance(value, int)}
        return replace(self, **own)


def fingerprint(manager: KVCacheManager) -> tuple[object, ...]:
    """Everything the books hold, to show that an operation changed nothing."""
    pools = [
        (p.refs.tobytes(), p.pins.tobytes(), p.published.tobytes(), p.closed.tobytes(), p.free_blocks.tobytes())
        for p in (manager.pool, manager.host_pool)
    ]
    blocks, tokens = manager.blocks, manager.tokens
    tables = [blocks.ids, blocks.masks, blocks.num_entries, tokens.positions, tokens.lengths, tokens.num_rows]
    tables += [tokens.num_live, tokens.evicted, tokens.in_order, manager.on_host, *tokens.columns.values()]
    index = (tuple(manager.prefix.cached_blocks), len(manager.prefix), manager.prefix.num_pending)
    return (pools, [t.tobytes() for t in tables], index, tuple(manager.used_lanes), str(manager.counters))
