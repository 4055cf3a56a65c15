"""Knorm: short keys draw attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.base import Policy, TokenView
from vtoken.policies.statistics import KeyNorm, Statistic


@dataclass(frozen=True, kw_only=True)
class Knorm(Policy):
    """Drop the tokens with the longest keys."""

    name = "knorm"
    source = "arXiv:2406.11430; uniform variant: norms averaged over heads and layers"

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (KeyNorm(),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return -view[KeyNorm()]
