"""StreamingLLM: the first tokens and the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.base import Policy, TokenView


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Attention sinks, and behind them a window that moves on with the text.

    Keys keep the rotation of their true positions; the paper counts positions within the cache.
    """

    name = "streaming_llm"
    source = "arXiv:2309.17453, code mit-han-lab/streaming-llm; tokens keep their true positions"

    sinks: int = 4

    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        return view.positions.astype(np.float64)
