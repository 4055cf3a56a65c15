"""Arithmetic over the tokens of a sequence, [lanes, tokens] each, that other sequences cannot touch.

How wide a view is depends on the longest sequence in it. numpy adds up a row in an order that depends on its width, so
a plain `sum(axis=1)` may differ in its last bit, and a victim with it. Here tokens are added in order of position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def total(values: Values, of: NDArray[np.bool_]) -> Values:
    """[lanes, 1]: the sum of a lane's values at the tokens `of`."""
    if not values.shape[1]:
        return np.zeros((len(values), 1))
    return np.cumsum(np.where(of, values, 0.0), axis=1)[:, -1:]


def softmax(values: Values, of: NDArray[np.bool_]) -> Values:
    """Softmax over the tokens `of` of each lane; 0 elsewhere."""
    highest = np.max(values, axis=1, keepdims=True, where=of, initial=-np.inf)
    raised = np.exp(np.where(of, values - highest, -np.inf))
    return raised / np.maximum(total(raised, of), np.finfo(np.float64).tiny)


def pool_mean(values: Values, of: NDArray[np.bool_], kernel: int) -> Values:
    """Mean over a token and its `kernel // 2` neighbours on either side; tokens not `of`, or not there, count as 0."""
    neighbours = _neighbours(np.where(of, values, 0.0), kernel, 0.0)
    pooled = np.zeros(values.shape)
    for offset in range(kernel):  # in this order for every width
        pooled += neighbours[:, offset : offset + values.shape[1]]
    return pooled / kernel


def pool_max(values: Values, of: NDArray[np.bool_], kernel: int) -> Values:
    """Maximum over a token and its `kernel // 2` neighbours on either side that are `of`; 0 where there are none."""
    neighbours = _neighbours(np.where(of, values, -np.inf), kernel, -np.inf)
    pooled = np.full(values.shape, -np.inf)
    for offset in range(kernel):
        np.maximum(pooled, neighbours[:, offset : offset + values.shape[1]], out=pooled)
    return np.where(np.isneginf(pooled), 0.0, pooled)


def rank_in_runs(values: Values, first: int, length: int) -> NDArray[np.int64]:
    """Rank of a token, 0 = lowest, among the run that it lies in: `length` tokens each, from token `first` on.

    Of equal ones the older ranks lower; NaN ranks highest.
    """
    tokens = np.arange(values.shape[1])
    runs = np.maximum((tokens - first) // length, -1)
    order = np.lexsort((values, np.broadcast_to(runs, values.shape)), axis=-1)
    ranks = np.empty(values.shape, np.int64)
    np.put_along_axis(ranks, order, np.broadcast_to(tokens, values.shape), axis=1)
    return ranks - np.where(runs >= 0, first + runs * length, 0)


def _neighbours(values: Values, kernel: int, beyond: float) -> Values:
    sides: Any = ((0, 0), (kernel // 2, kernel // 2))
    return np.pad(values, sides, constant_values=beyond)
