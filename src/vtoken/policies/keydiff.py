"""KeyDiff: keys that stand out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.base import Policy, TokenView
from vtoken.policies.statistics import KeySimilarity, Statistic


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Drop the tokens whose keys are most like the mean of all keys."""

    name = "keydiff"
    source = (
        "arXiv:2504.15364, prompts in pieces of 128 as there; uniform variant: cosines averaged over heads and layers"
    )

    prefill_stride: int | None = 128

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (KeySimilarity(),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return -view[KeySimilarity()]
