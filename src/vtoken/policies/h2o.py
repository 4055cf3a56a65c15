"""H2O: heavy hitters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.base import Policy, TokenView
from vtoken.policies.statistics import Statistic, Sum


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Half of the budget is for the most recent tokens, half for those that drew most attention so far."""

    name = "h2o"
    source = (
        "arXiv:2306.14048, code FMInference/H2O; uniform variant: attention summed over heads and layers, a decision "
        "a stride instead of each token"
    )

    recent: int | float = 0.5

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (Sum(),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return view[Sum()]
