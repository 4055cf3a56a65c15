"""`plan_reclaim`: how a sequence gives blocks back, and whether that is worth a copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ReclaimPlan:
    """Which of a sequence's own blocks stay and which are emptied."""

    keep: NDArray[np.int64]  # entries that stay, the fullest first
    empty: NDArray[np.int64]  # entries whose live tokens move into the free cells of those kept; then they return
    num_copies: int  # live tokens in `empty`
    reason: str  # "packed" | "dead_blocks" | "no_gain"


def plan_reclaim(live: NDArray[np.int32], block_size: int, spare_cells: int = 0, compact: bool = True) -> ReclaimPlan:
    """Bring a sequence to the fewest blocks with the fewest copies.

    `live` counts the live tokens in each of its own blocks. Keeping the `k` fullest costs the live tokens outside them,
    so the best plan for `k` blocks needs no search. `spare_cells` free cells are left for a sequence that is about to
    write. Fully dead blocks return in any case; with `compact=False` only they do. Nothing is copied for no gain:
    4, 4, 4, 1 live in blocks of 4 need four blocks, and four there are.
    """
    order = np.argsort(-live, kind="stable")
    num_used = int(np.count_nonzero(live))
    num_kept = -(-(int(live.sum()) + spare_cells) // block_size)
    packs = compact and num_kept < num_used
    keep = order[: num_kept if packs else num_used]
    empty = order[len(keep) :]
    reason = "packed" if packs else "dead_blocks" if len(empty) else "no_gain"
    return ReclaimPlan(keep, empty, int(live[empty].sum()), reason)
