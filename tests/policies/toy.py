"""A toy of a model: random queries, keys and values, and what papers compute from them, in plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.statistics import (
    CountLow,
    FutureAttention,
    KeyNorm,
    KeyRedundancy,
    KeySimilarity,
    LagDeviation,
    Statistic,
    Sum,
    SumLast,
    ValueNorm,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Toy:
    """Queries [layers, heads, tokens, width]; keys and values [layers, kv_heads, tokens, width]."""

    queries: Floats
    keys: Floats
    values: Floats

    @classmethod
    def random(cls, num_tokens: int, seed: int, layers: int = 2, heads: int = 4, kv_heads: int = 2) -> Toy:
        source, width = np.random.default_rng(seed), 6
        # A common direction, so that some keys are alike and some queries have favourites.
        common = source.normal(size=width)
        return cls(
            source.normal(size=(layers, heads, num_tokens, width)) + common,
            source.normal(size=(layers, kv_heads, num_tokens, width)) + 1.5 * common,
            source.normal(size=(layers, kv_heads, num_tokens, width)),
        )

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    def query_heads(self) -> list[tuple[int, int, int]]:
        """Layer, query head, and the KV head that it reads."""
        layers, heads = self.queries.shape[:2]
        group = heads // self.keys.shape[1]
        return [(layer, head, head // group) for layer, head in product(range(layers), range(heads))]

    def kv_heads(self) -> list[tuple[int, int]]:
        return list(product(range(self.keys.shape[0]), range(self.keys.shape[1])))

    def attention(self, layer: int, head: int, kv_head: int) -> Floats:
        """[query, key] probabilities, causal."""
        found = np.zeros((self.num_tokens, self.num_tokens))
        for i in range(self.num_tokens):
            logits = [
                float(self.queries[layer, head, i] @ self.keys[layer, kv_head, j]) / math.sqrt(6) for j in range(i + 1)
            ]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            found[i, : i + 1] = np.array(weights) / sum(weights)
        return found

    def statistic(self, statistic: Statistic) -> Floats:
        """[tokens]: what a backend hands to policies, by its definition."""
        n = self.num_tokens
        match statistic:
            case Sum():
                return sum(self.attention(*head).sum(axis=0) for head in self.query_heads())
            case SumLast(window):
                return sum(self.attention(*head)[max(0, n - window) :].sum(axis=0) for head in self.query_heads())
            case CountLow(window):
                counts = np.zeros(n)
                for head in self.query_heads():
                    attention = self.attention(*head)
                    for i in range(max(0, n - window), n):
                        for j in range(i + 1):
                            counts[j] += attention[i, j] < 1 / (i + 1)
                return counts
            case KeyNorm():
                return np.mean([norms(self.keys[head]) for head in self.kv_heads()], axis=0)
            case ValueNorm():
                return np.mean([norms(self.values[head]) for head in self.kv_heads()], axis=0)
            case KeySimilarity():
                return np.mean([self.similarity(*head) for head in self.kv_heads()], axis=0)
            case KeyRedundancy(threshold):
                return np.mean([self.redundancy(*head, threshold) for head in self.kv_heads()], axis=0)
            case LagDeviation(lag, sinks):
                parts = [self.lag_deviation(*head, lag, sinks) for head in self.kv_heads()]
                return np.mean(parts, axis=0)
            case FutureAttention():
                return np.mean([self.attention(*head)[-1] for head in self.query_heads()], axis=0)
        raise AssertionError(statistic)

    def similarity(self, layer: int, head: int) -> Floats:
        """Cosine of each key with the mean of all keys of length one."""
        keys = self.keys[layer, head]
        mean = sum(key / np.linalg.norm(key) for key in keys) / len(keys)
        return np.array([cosine(key, mean) for key in keys])

    def redundancy(self, layer: int, head: int, threshold: float) -> Floats:
        keys = self.keys[layer, head]
        n = len(keys)
        cosines = np.array([[cosine(keys[i], keys[j]) if i != j else 0.0 for j in range(n)] for i in range(n)])
        for i in range(n):
            similar = [j for j in range(n) if cosines[i, j] > threshold]
            if similar:
                cosines[i, similar[-1]] = 0.0
        return cosines.mean(axis=0)

    def lag_deviation(self, layer: int, head: int, lag: int, sinks: int) -> Floats:
        """Keys and values added; infinity where there is no next run."""
        found = np.full(self.num_tokens, np.inf)
        for start in range(sinks, self.num_tokens - 2 * lag + 1, lag):
            run, following = slice(start, start + lag), slice(start + lag, start + 2 * lag)
            found[run] = 0.0
            for states in (self.keys[layer, head], self.values[layer, head]):
                low, high = states[following].min(axis=0), states[following].max(axis=0)
                spread = [math.sqrt(variance((state - low) / (high - low))) for state in states[run]]
                raised = np.array([math.exp(each) for each in spread])
                found[run] += raised / raised.sum()
        return found


def norms(states: Floats) -> Floats:
    return np.array([math.sqrt(sum(float(x) ** 2 for x in state)) for state in states])


def cosine(a: Floats, b: Floats) -> float:
    return float(a @ b) / (math.sqrt(float(a @ a)) * math.sqrt(float(b @ b)))


def variance(values: Floats) -> float:
    mean = float(values.mean())
    return sum((float(value) - mean) ** 2 for value in values) / (len(values) - 1)
