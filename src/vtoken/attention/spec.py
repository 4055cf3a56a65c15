"""What attention has to know of one layer of a model. No torch here: reading a config costs none."""

from __future__ import annotations

from dataclasses import dataclass


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
