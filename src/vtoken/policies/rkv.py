"""R-KV: important, and not said before. Made for long reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.arithmetic import pool_max, softmax, total
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.parameters import Count, Odd, Share
from vtoken.policies.statistics import KeyRedundancy, Statistic, SumLast


@dataclass(frozen=True, kw_only=True)
class RKV(Policy):
    """`weight` times a token's share of the attention, less `1 - weight` times its share of the redundancy."""

    name = "rkv"
    source = (
        "arXiv:2505.24133, code Zefan-Cai/R-KV (its mix_lambda is `weight`); uniform variant: attention and cosines "
        "reduced over heads and layers before they are mixed"
    )
    keeps_window = True

    stride: int | None = 128
    weight: Share = 0.07
    window: Count = 8
    kernel: Odd = 7
    threshold: float = 0.5

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return SumLast(self.window), KeyRedundancy(self.threshold)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        drawn, repeated = (view[need] for need in self.needs)
        old = view.is_before_last(self.window)
        attention = drawn / np.maximum(total(drawn, old), np.finfo(np.float64).tiny)
        redundancy = softmax(repeated, view.is_live & ~np.isnan(repeated))
        return self.weight * pool_max(attention, old, self.kernel) - (1 - self.weight) * redundancy
