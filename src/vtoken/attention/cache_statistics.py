"""Statistics that are read from keys and values: each a function of one layer and one sequence, averaged over KV heads.

What comes out depends on the tokens in order of position and on nothing else: the same numbers go through the same
operations in memory that is aligned alike. They are float32; sums over tokens and layers that may become large, and
softmaxes, are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from vtoken.attention.rotation import Rotation
from vtoken.attention.spec import AttentionSpec
from vtoken.policies.statistics import (
    CacheStatistic,
    FutureAttention,
    KeyNorm,
    KeyRedundancy,
    KeySimilarity,
    LagDeviation,
    ValueNorm,
)

# Tokens that all others are compared with at once, in the end and at first: what bounds the memory of KeyRedundancy.
PAIR_BLOCK: Final = 256
FIRST_BLOCK: Final = 16


@dataclass(frozen=True, eq=False)
class FutureQueries:
    """The queries of a sequence's last tokens, and how the positions to come would turn them."""

    last: Callable[[int], Tensor]  # layer -> [w, num_heads, head_dim] float32, not turned
    turns: Sequence[Rotation]  # the model's, of the next positions [horizon]
    next_position: int

    @cached_property
    def mean_turns(self) -> tuple[Rotation, ...]:
        """[1, rotary_dim / 2] float64 each: the mean over the positions."""
        return tuple(
            Rotation(*(part.double().mean(dim=0, keepdim=True) for part in (turn.cos, turn.sin))) for turn in self.turns
        )

    def distribution(self, layer: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Mean [num_heads, head_dim] and covariance [num_heads, head_dim, head_dim] of the queries, float64, turned by
        the mean of the turns."""
        queries = self.last(layer).double()
        mean = queries.mean(dim=0)
        centred = (queries - mean).transpose(0, 1).contiguous()  # [num_heads, w, head_dim]
        covariance = torch.bmm(centred.transpose(1, 2), centred) / len(queries)
        turn = spec.pick(self.mean_turns)
        if turn is None:
            return mean, covariance
        turned = _turned(_turned(covariance, turn).transpose(1, 2), turn).transpose(1, 2)
        return _turned(mean[None], turn)[0], turned


def _turned(x: Tensor, turn: Rotation) -> Tensor:
    """x [..., heads, head_dim] float64, turned by one mean turn; `Rotation` itself computes in float32."""
    width = 2 * turn.cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    cos, sin = turn.cos, turn.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., width:]), dim=-1)


@dataclass(frozen=True, eq=False)
class LayerView:
    """Live tokens of one sequence in one layer, in order of position."""

    layer: int
    spec: AttentionSpec
    positions: Tensor  # [N] int64
    read_keys: Callable[[], Tensor]  # float32 [num_kv_heads, N, head_dim]
    read_values: Callable[[], Tensor]
    future: FutureQueries | None = None  # FutureAttention alone needs it

    @cached_property
    def keys(self) -> Tensor:
        return self.read_keys()

    @cached_property
    def values(self) -> Tensor:
        return self.read_values()


def _norms(x: Tensor) -> Tensor:
    """[..., D] -> [...]. Row by row, so a token's norm does not depend on which others it is computed with."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms


def _head_mean(x: Tensor) -> Tensor:
    """[heads, N] -> float64 [N]. Sums over the last dimension are taken row by row."""
    return x.double().T.contiguous().mean(dim=-1)


def key_norm(view: LayerView, statistic: KeyNorm) -> Tensor:
    return _head_mean(_norms(view.keys))


def value_norm(view: LayerView, statistic: ValueNorm) -> Tensor:
    return _head_mean(_norms(view.values))


def key_similarity(view: LayerView, statistic: KeySimilarity) -> Tensor:
    inverse = 1 / _norms(view.keys).clamp_(min=1e-12)  # [num_kv_heads, N]
    anchor = torch.bmm(inverse[:, None], view.keys)  # [num_kv_heads, 1, head_dim] N times the mean of the directions
    anchor /= _norms(anchor).clamp_(min=1e-8)[..., None]
    return _head_mean(torch.bmm(view.keys, anchor.transpose(1, 2))[..., 0] * inverse)


def key_redundancy(view: LayerView, statistic: KeyRedundancy) -> Tensor:
    """The sum of all cosines with a token needs no pairs: it is one product with the sum of all directions. Pairs are
    looked at only to find each token's last similar one, from the end of the text on, until it is found."""
    directions = view.keys / _norms(view.keys).clamp_(min=1e-12)[..., None]
    total = directions.sum(dim=1, keepdim=True)  # [num_kv_heads, 1, head_dim]
    sums = torch.bmm(directions, total.transpose(1, 2))[..., 0].double()  # [num_kv_heads, N]
    sums -= directions.square().sum(dim=-1)  # the token itself
    for head, keys in enumerate(directions):
        last, cosines = _last_similar(keys, statistic.threshold)
        sums[head].index_add_(0, last, cosines.double(), alpha=-1)
    return _head_mean(sums) / len(view.positions)


def _last_similar(keys: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """keys [N, head_dim] of length one -> for each that has similar others: the last of them [M], and their cosine."""
    left = torch.arange(len(keys))  # those that have not found one yet
    found: list[Tensor] = []
    cosines: list[Tensor] = []
    # Where similar tokens are frequent, most have found theirs after few of the candidates.
    end, size = len(keys), FIRST_BLOCK
    while end and len(left):
        begin = max(0, end - size)
        # The last candidate first, since argmax gives the first of several.
        products = keys.index_select(0, left) @ keys[begin:end].flip(0).T  # [left, candidates]
        inside = torch.nonzero((left >= begin) & (left < end)).flatten()
        products[inside, end - 1 - left[inside]] = -torch.inf  # nobody is similar to itself
        is_similar = (products > threshold).view(torch.uint8)
        first = is_similar.argmax(dim=1)
        has_one = is_similar.gather(1, first[:, None])[:, 0].bool()
        rows = torch.nonzero(has_one).flatten()
        found.append(end - 1 - first[rows])
        cosines.append(products[rows, first[rows]])
        left = left[~has_one]
        end, size = begin, min(2 * size, PAIR_BLOCK)
    return torch.cat(found), torch.cat(cosines)


def lag_deviation(view: LayerView, statistic: LagDeviation) -> Tensor:
    num_tokens, lag, sinks = len(view.positions), statistic.lag, statistic.sinks
    result = torch.full((num_tokens,), torch.inf, dtype=torch.float64)
    num_scored = max(0, num_tokens - sinks) // lag - 1  # runs that are scored: the last whole one only spans a range
    if num_scored < 1:
        return result
    end = sinks + num_scored * lag
    scores = torch.zeros(num_scored * lag, dtype=torch.float64)
    for x in (view.keys, view.values):
        # [num_kv_heads, runs, lag, head_dim]
        runs = x[:, sinks : end + lag].reshape(len(x), num_scored + 1, lag, x.shape[2])
        least, width = runs[:, 1:].amin(dim=2, keepdim=True), runs[:, 1:].amax(dim=2, keepdim=True)
        width -= least
        # A channel in which the next run does not vary tells nothing.
        factor = torch.where(width > 0, 1 / width, 0.0)
        deviations = _deviation((runs[:, :-1] - least).mul_(factor))
        scores += _head_mean(deviations.double().softmax(dim=2).flatten(1))
    result[sinks:end] = scores
    return result


def _deviation(x: Tensor) -> Tensor:
    """Standard deviation over the last dimension, n - 1 in the denominator; 0 for a single number. Overwrites x."""
    count = x.shape[-1]
    x -= x.mean(dim=-1, keepdim=True)
    return x.square_().sum(dim=-1).div_(max(count - 1, 1)).sqrt_()


def future_attention(view: LayerView, statistic: FutureAttention) -> Tensor:
    assert view.future is not None
    keys, scale = view.keys, view.spec.scale
    num_kv_heads, num_tokens, head_dim = keys.shape
    is_seen = torch.ones(num_tokens, dtype=torch.bool)
    if view.spec.window is not None:  # the others no query to come can see in this layer
        is_seen = view.positions > view.future.next_position - view.spec.window
        if not is_seen.any():
            return torch.zeros(num_tokens, dtype=torch.float64)
    mean, covariance = (part.float() for part in view.future.distribution(view.layer, view.spec))
    group = len(mean) // num_kv_heads
    # Of a query that is normally distributed, e^(scale q.k) has this logarithm of its mean.
    scores = scale * torch.bmm(mean.view(num_kv_heads, group, head_dim), keys.transpose(1, 2))  # [.., group, N]
    for member in range(group):
        spread = torch.bmm(keys, covariance[member::group].contiguous())
        scores[:, member] += 0.5 * scale**2 * spread.mul_(keys).sum(dim=-1)
    scores.masked_fill_(~is_seen, -torch.inf)
    drawn = scores.double().softmax(dim=-1).mean(dim=1)  # [num_kv_heads, N]
    return _head_mean(drawn * _norms(view.values))


Reader = Callable[[LayerView, Any], Tensor]  # -> float64 [N], averaged over heads

READERS: Final[dict[type[CacheStatistic], Reader]] = {
    KeyNorm: key_norm,
    ValueNorm: value_norm,
    KeySimilarity: key_similarity,
    KeyRedundancy: key_redundancy,
    LagDeviation: lag_deviation,
    FutureAttention: future_attention,
}


def read(view: LayerView, statistic: CacheStatistic) -> Tensor:
    """[N] float64: one layer's part of the statistic, for each of the view's tokens."""
    return READERS[type(statistic)](view, statistic)
