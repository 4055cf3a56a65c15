"""Scissorhands: what was rarely of importance lately will not be soon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.base import Policy, TokenView
from vtoken.policies.parameters import Count
from vtoken.policies.statistics import CountLow, Statistic


@dataclass(frozen=True, kw_only=True)
class Scissorhands(Policy):
    """Drop the tokens that most often drew less than the average attention of a query, over a history of `window`."""

    name = "scissorhands"
    source = (
        "arXiv:2305.17118, algorithm 2 with its r = 10, w = 400; uniform variant: counted over heads and layers, "
        "drops what a stride brings instead of half the buffer"
    )

    recent: int | float = 10
    window: Count = 400

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (CountLow(self.window),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return -view[CountLow(self.window)]
