"""PagedEviction: whole blocks die, so memory returns without a copy, at the price of the good tokens in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.base import Policy, TokenView
from vtoken.policies.statistics import KeyNorm, Statistic, ValueNorm


@dataclass(frozen=True, kw_only=True)
class PagedEviction(Policy):
    """Give up the blocks with the lowest mean ratio of value norm to key norm."""

    name = "paged_eviction"
    source = (
        "arXiv:2509.04377; uniform variant: norms averaged over heads and layers; prompts lose blocks too, there they"
        " lose tokens before blocks are filled"
    )
    whole_blocks = True

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return ValueNorm(), KeyNorm()

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return view[ValueNorm()] / np.maximum(view[KeyNorm()], np.finfo(np.float64).tiny)
