"""From scores to victims: who is protected, who dies, and what a policy's answer must look like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.base.errors import EngineError, VtokenError, describe
from vtoken.policies.base import Policy, TokenView

Mask = NDArray[np.bool_]
Pins = Iterable[tuple[int, int]]


class PolicyError(EngineError):
    """A policy failed to score the tokens of some requests, or scored them with what is no score."""


def protection(policy: Policy, view: TokenView, pins: Sequence[Pins] = ()) -> Mask:
    """[lanes, tokens]: tokens that may not die: the first `sinks` of the text, the last `recent`, and the positions in
    the ranges [start, end) that are pinned for each lane. `pins` has an entry a lane, or none at all."""
    recent = np.array([policy.num_recent(budget) for budget in view.budgets.tolist()], np.int64)
    protected = ~view.is_before_last(recent) | (view.positions < policy.sinks)
    for lane, ranges in enumerate(pins):
        for start, end in ranges:
            protected[lane] |= (view.positions[lane] >= start) & (view.positions[lane] < end)
    return protected


def checked_scores(policy: Policy, view: TokenView, candidates: Mask | None = None) -> NDArray[np.float64]:
    """[lanes, tokens]: the policy's scores, of which those of `candidates` (None = the live tokens) are numbers.

    Infinity is a score. Raises PolicyError, in words for who wrote the policy, when `score` raises, or returns an array
    of another shape or kind, a masked one, or NaN for a candidate.
    """
    shape = view.positions.shape
    try:
        with np.errstate(all="ignore"):  # padding may hold anything, and NaN is looked for below
            scores: Any = policy.score(view)
    except VtokenError:
        raise
    except Exception as error:  # a policy may be anybody's
        raise PolicyError(f"kv_policy {policy.name!r}: score() failed with {describe(error)}") from error
    # What lies under a mask is hidden from every check below.
    is_plain = isinstance(scores, np.ndarray) and not isinstance(scores, np.ma.MaskedArray)
    if not is_plain or scores.dtype.kind not in "fiub":
        got = f"an array of {scores.dtype}" if is_plain else f"a {type(scores).__name__}"
        raise PolicyError(f"kv_policy {policy.name!r}: score() returned {got} where an array of numbers was expected")
    if scores.shape != shape:
        raise PolicyError(
            f"kv_policy {policy.name!r}: score() returned shape {list(scores.shape)} for {list(shape)} lanes and tokens"
        )
    checked: NDArray[np.float64] = np.asarray(scores, np.float64)
    is_nan = np.isnan(checked) & (view.is_live if candidates is None else candidates)
    if is_nan.any():
        lane, token = np.argwhere(is_nan)[0]
        raise PolicyError(
            f"kv_policy {policy.name!r}: score() returned NaN for {np.count_nonzero(is_nan)} live tokens, the first at "
            f"position {view.positions[lane, token]}"
        )
    return checked


def choose_victims(policy: Policy, view: TokenView, protected: Mask, num_victims: NDArray[Any]) -> Mask:
    """[lanes, tokens]: which tokens die: of the live ones that are not `protected`, the `num_victims` [lanes] with the
    lowest scores, of equal ones the older; as many as there are if they are fewer.

    A policy of whole blocks gives up as few blocks as have at least that many tokens; see `_lowest_blocks`.
    Raises PolicyError as `checked_scores` does.
    """
    candidates = view.is_live & ~protected
    scores = checked_scores(policy, view, candidates)
    if policy.whole_blocks:
        return _lowest_blocks(scores, view, protected, num_victims)
    return _lowest(scores, candidates, np.minimum(num_victims, candidates.sum(axis=1)))


def _lowest(scores: NDArray[np.float64], candidates: Mask, counts: NDArray[Any]) -> Mask:
    """[n, m]: in each row the `counts` [n] lowest scores among the candidates, of which there are enough; of equal
    scores the first."""
    victims = np.zeros(scores.shape, np.bool_)
    rows = np.flatnonzero(counts > 0)
    if not len(rows):
        return victims
    candidates, counts = candidates[rows], counts[rows]
    scores = np.where(candidates, scores[rows], np.inf)
    # The highest score that dies. Of those that have it, only the first ones die.
    most = int(counts.max())
    lowest = np.sort(np.partition(scores, most - 1, axis=1)[:, :most], axis=1)
    last = np.take_along_axis(lowest, counts[:, None].astype(np.int64) - 1, axis=1)
    lower = candidates & (scores < last)
    equal = candidates & (scores == last)
    room = counts[:, None] - lower.sum(axis=1, keepdims=True)
    victims[rows] = lower | (equal & (np.cumsum(equal, axis=1) <= room))
    return victims


def _lowest_blocks(scores: NDArray[np.float64], view: TokenView, protected: Mask, num_victims: NDArray[Any]) -> Mask:
    """[lanes, tokens]: the live tokens of the blocks with the lowest mean scores, of equal ones that with the oldest
    token; as few blocks as reach `num_victims`. Blocks with a protected token stay whole, and so does the block of the
    newest token, which is still being filled."""
    num_lanes, num_tokens = scores.shape
    victims = np.zeros(scores.shape, np.bool_)
    if not view.is_live.any():
        return victims
    width = int(view.blocks[view.is_live].max()) + 1
    # Cells of [lanes, width], one a block of a lane; tokens in padding go nowhere.
    lanes, tokens = np.nonzero(view.is_live)
    cells = lanes * width + view.blocks[lanes, tokens]
    sizes = np.bincount(cells, minlength=num_lanes * width).reshape(num_lanes, width)
    sums = np.bincount(cells, scores[lanes, tokens], num_lanes * width).reshape(num_lanes, width)
    oldest = np.full(num_lanes * width, num_tokens)
    np.minimum.at(oldest, cells, tokens)
    is_open = sizes > 0
    is_open.reshape(-1)[cells[protected[lanes, tokens]]] = False
    some = np.flatnonzero(view.num_live)
    is_open[some, view.blocks[some, view.num_live[some] - 1]] = False
    means = np.where(is_open, sums / np.maximum(sizes, 1), np.inf)
    order = np.lexsort((oldest.reshape(num_lanes, width), means, ~is_open), axis=-1)
    gain = np.take_along_axis(np.where(is_open, sizes, 0), order, axis=1)
    before = np.cumsum(gain, axis=1) - gain
    dies = np.zeros((num_lanes, width), np.bool_)
    np.put_along_axis(dies, order, (before < np.asarray(num_victims)[:, None]) & (gain > 0), axis=1)
    victims[lanes, tokens] = dies.reshape(-1)[cells]
    return victims
