"""What attention has to know of one layer of a model. No torch here: reading a config costs none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionSpec:
    """How one layer attends.

    The score of a query at position `p` for a key is `scale * q.k`, then `soft_cap * tanh(score / soft_cap)` where a
    soft cap is set (Gemma 2, arXiv:2408.00118, section 2). With a window the query sees positions `> p - window` only,
    its own included (the convention of `sliding_window` in transformers).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    rotation: int | None = 0
    """Which of the model's rotations turns queries and keys; None where none does."""

    def pick(self, rotations: Sequence[T]) -> T | None:
        """This layer's one of the model's rotations."""
        return None if self.rotation is None else rotations[self.rotation]
