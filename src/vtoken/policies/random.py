"""Chance: the policy that scatters survivors most evenly, and the one to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.base.hashing import uniform
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.parameters import Whole


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Every token draws its score once, from a hash of `seed` and position."""

    name = "random"
    source = "a control; a hash of seed and position, so that nothing else decides"

    seed: Whole = 0

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return uniform(self.seed, view.positions)
