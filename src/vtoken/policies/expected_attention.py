"""Expected Attention: what queries to come will look at, if they are like those that came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.base import Policy, TokenView
from vtoken.policies.parameters import Count
from vtoken.policies.statistics import FutureAttention, Statistic


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """Keep the tokens that may expect most attention of the next `horizon` queries, times the norm of their values."""

    name = "expected_attention"
    source = (
        "arXiv:2510.00636, code NVIDIA/kvpress; uniform variant: averaged over heads and layers, queries as the last "
        "`window` ones were (there all of the prompt), sinks in the softmax"
    )

    sinks: int = 4
    prefill_stride: int | None = None
    horizon: Count = 512
    window: Count = 128

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (FutureAttention(self.horizon, self.window),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return view[FutureAttention(self.horizon, self.window)]
