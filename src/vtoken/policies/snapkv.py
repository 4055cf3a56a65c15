"""SnapKV: the end of the prompt knows what the answer will look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.arithmetic import pool_mean
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.parameters import Count, Odd
from vtoken.policies.statistics import Statistic, SumLast


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Keep the last `window` tokens, and what their queries look at, smoothed over `kernel` neighbouring tokens."""

    name = "snapkv"
    source = (
        "arXiv:2404.14469, code FasterDecoding/SnapKV; uniform variant: summed over heads and layers, the answer "
        "loses tokens as the prompt does, there it keeps all"
    )
    keeps_window = True

    prefill_stride: int | None = None
    window: Count = 32
    kernel: Odd = 5

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (SumLast(self.window),)

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return pool_mean(view[SumLast(self.window)], view.is_before_last(self.window), self.kernel)
