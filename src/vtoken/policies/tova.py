"""TOVA: what the last token looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.base import Policy, TokenView
from vtoken.policies.statistics import Statistic, SumLast


@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Drop the tokens to which the last query gives the least attention."""

    name = "tova"
    source = (
        "arXiv:2401.06104, code schwartz-lab-NLP/TOVA; uniform variant: summed over heads and layers, the newest "
        "token stays, a decision a stride instead of each token"
    )

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (SumLast(1),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return view[SumLast(1)]
