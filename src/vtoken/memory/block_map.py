"""`block_map`: every block of the device pool at one moment, as one small record each, for who watches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vtoken.memory import bits
from vtoken.memory.stats import overlay

if TYPE_CHECKING:
    from vtoken.memory.kv_cache_manager import KVCacheManager

NOBODY: Final = 0xFFFF
"""The owner of a block that no sequence holds."""

PUBLISHED: Final = 1
PINNED: Final = 2

BLOCK: Final = np.dtype(
    [
        ("mask", "<u4"),  # bit i: slot i is read by a sequence; of the first 32 slots
        ("owner", "<u2"),  # the lowest lane that holds it, or NOBODY
        ("live", "<u2"),  # slots that a sequence reads
        ("used", "<u2"),  # cells up to the last used one: `used - live` of them are holes, the others tail slack
        ("refs", "u1"),  # sequences that hold it, 255 for more
        ("flags", "u1"),  # PUBLISHED, PINNED
    ]
)
"""Little-endian and without padding, so that its bytes are a format. A block is held if `refs`, else cached if
PUBLISHED, else pinned if PINNED, else free."""


def block_map(manager: KVCacheManager) -> NDArray[Any]:
    """[num_blocks] of `BLOCK`. Changes nothing; no loop over blocks or tokens."""
    pool, blocks = manager.pool, manager.blocks
    lanes = np.flatnonzero(manager.is_open & ~manager.on_host)
    used_cells, live = overlay(manager, lanes)
    found = np.zeros(pool.num_blocks, BLOCK)
    found["mask"] = live[:, 0]
    found["live"] = bits.count(live)
    found["used"] = used_cells
    found["refs"] = np.minimum(pool.refs, 255)
    found["flags"] = np.where(pool.published, PUBLISHED, 0) | np.where(pool.pins > 0, PINNED, 0)
    owner = np.full(pool.num_blocks, NOBODY, np.uint16)
    ids = blocks.ids[lanes]
    index, entries = np.nonzero(ids >= 0)
    # What is written last stays: the lowest lane.
    owner[ids[index[::-1], entries[::-1]]] = np.minimum(lanes[index[::-1]], NOBODY - 1)
    found["owner"] = owner
    return found
