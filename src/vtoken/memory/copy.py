"""`Copy`: the one order by which KV moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class CopyKind(Enum):
    COPY_ON_WRITE = "copy_on_write"
    RELOCATE = "relocate"
    SWAP_OUT = "swap_out"  # src on the device, dst on the host
    SWAP_IN = "swap_in"  # src on the host, dst on the device


@dataclass(frozen=True, eq=False)
class Copy:
    """Copy the KV of `src[i]` to `dst[i]` in every layer.

    Ordered copies (`ticket is None`) run in list order before the plan's forward pass. A beside-copy has a ticket: it
    may run while steps go on, and the executor reports the ticket in `StepResult.ended` when it is done.
    Swaps always name whole blocks: the slots of one block after the other, in order.
    """

    kind: CopyKind
    src: NDArray[np.int64]  # [n] slots
    dst: NDArray[np.int64]  # [n] slots
    ticket: int | None = None

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True)
class CopyCounts:
    """Copies that were done since the start."""

    num_copies: dict[CopyKind, int] = field(default_factory=lambda: dict.fromkeys(CopyKind, 0))
    bytes_copied: dict[CopyKind, int] = field(default_factory=lambda: dict.fromkeys(CopyKind, 0))  # of KV, written
    seconds_waited: float = 0.0  # for how long steps waited: all of an ordered copy, the start of one beside
