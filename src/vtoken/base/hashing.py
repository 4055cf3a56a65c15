"""Counter-based randomness: a number is a function of its keys, so nothing has to be saved or restored.

The mixer is the finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


def mix64(*keys: ArrayLike) -> NDArray[np.uint64]:
    """Hash integer keys, broadcast against each other, into uint64 of the broadcast shape.

    The order of the keys matters. Signed keys count by their two's complement.
    """
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64 on purpose
        for key in keys:
            word = np.asarray(key)
            if word.dtype != np.uint64:
                # A Python int from 2**63 on arrives as uint64 already; the rest is signed.
                word = word.astype(np.int64).astype(np.uint64)
            state = _finalise((state + _GOLDEN) ^ word)
    return state


def uniform(*keys: ArrayLike) -> NDArray[np.float64]:
    """A float64 in [0, 1) for the same keys as `mix64`, with 53 random bits."""
    return (mix64(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53
