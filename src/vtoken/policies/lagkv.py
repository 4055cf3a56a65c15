"""LagKV: tokens that stick out of what follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.arithmetic import rank_in_runs
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.parameters import Count
from vtoken.policies.statistics import LagDeviation, Statistic


@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Of each run of `lag` tokens, drop those that lie best within the range of the next run; the last run stays."""

    name = "lagkv"
    source = (
        "arXiv:2504.04704, code AI-Lab-China-Merchants-Bank/LagKV, NVIDIA/kvpress; uniform variant: averaged over "
        "heads and layers, survivors cut into runs anew at each decision"
    )

    sinks: int = 4
    stride: int | None = 128
    lag: Count = 128

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (LagDeviation(self.lag, self.sinks),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        deviation = view[LagDeviation(self.lag, self.sinks)]
        ranks = rank_in_runs(deviation, self.sinks, self.lag) / self.lag
        return np.where(np.isinf(deviation), np.inf, ranks)  # no next run to be judged by: last to die
