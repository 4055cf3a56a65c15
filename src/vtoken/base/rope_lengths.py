"""`RopeLengths`: the length a sequence turns by, where rotary embedding depends on how long it becomes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeLengths:
    """Which sequences turn alike.

    Keys lie in the cache turned, so a sequence keeps to one length from its first token on: what prompt and
    `max_tokens` can come to, brought here to the length that stands for all that turn alike.
    """

    original: int  # what the model was trained for: up to here every sequence turns by this length
    longest: int | None = None  # what all longer ones turn by; None = each by its own length

    def of(self, total: int) -> int:
        """The length by which a sequence of up to `total` tokens turns."""
        if total <= self.original:
            return self.original
        return total if self.longest is None else self.longest
