"""Draw the next tokens.

A draw depends on its logits, its parameters and its keys (seed, choice, index) alone: rows are computed apart, in
float64, and one hashed uniform number is turned into a token by the inverse of the cumulative distribution. Nothing has
to be saved over a preemption, and no neighbour can change a draw.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.base.hashing import uniform
from vtoken.kernels.sampling import RowStatus, sample_rows
from vtoken.schedule.plan import SamplingBatch

_UNUSABLE = (
    "the model's logits hold {} values, so no token can be drawn; with dtype='float16' numbers may overflow: try "
    "'bfloat16' or 'float32'"
)
_REASONS = {
    RowStatus.NAN: _UNUSABLE.format("NaN"),
    RowStatus.INFINITE: _UNUSABLE.format("infinite"),
    RowStatus.RULED_OUT: "the model ruled out every token (all logits are -inf)",
}

_ELEMENTS_AT_ONCE = 2**22  # of float64 probabilities: bounds the memory of a large batch to some hundred MiB


def sample(logits: Tensor, batch: SamplingBatch, *, compiled: bool = False) -> tuple[NDArray[np.int32], dict[int, str]]:
    """One token a row of `logits` [N, vocab] float32, and the rows that failed with the reason.

    Greedy rows take the highest logit, the lowest index among equals. The others apply temperature, min_p, top_k and
    top_p in this order (as vLLM does); top_k keeps exactly k tokens, the lower index among equals. A row with a NaN,
    an infinite or no finite logit gets token -1 and an error; other rows are untouched by it.

    `compiled` draws by the compiled kernel: the same tokens, but for a uniform number within rounding of a boundary.
    """
    num_rows, vocab_size = logits.shape
    assert num_rows == len(batch), "one row of logits a draw"
    if compiled:
        uniforms = uniform(batch.seeds, batch.choices, batch.indices)
        limits = batch.temperature, batch.min_p, batch.top_p, batch.top_k
        tokens, statuses = sample_rows(logits, batch.is_greedy, *limits, uniforms)
        return tokens, {row: _reason(RowStatus(statuses[row]), row, batch) for row in np.flatnonzero(statuses).tolist()}
    tokens = np.full(num_rows, -1, dtype=np.int32)
    errors = _errors(logits, batch)
    good = np.ones(num_rows, dtype=np.bool_)
    good[list(errors)] = False

    greedy = batch.is_greedy
    uniforms = uniform(batch.seeds, batch.choices, batch.indices)
    # A limit that cannot bind is off, so that a row takes the same path however "off" was written.
    limited = ((batch.top_k > 0) & (batch.top_k < vocab_size)) | (batch.top_p < 1.0)

    rows = np.flatnonzero(good & greedy)
    if len(rows):
        tokens[rows] = logits[torch.from_numpy(rows)].argmax(dim=1).numpy()
    step = max(1, _ELEMENTS_AT_ONCE // vocab_size)
    for draw, chosen in ((_draw_by_index, ~limited), (_draw_by_rank, limited)):
        rows = np.flatnonzero(good & ~greedy & chosen)
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            tokens[part] = draw(logits[torch.from_numpy(part)], batch, part, torch.from_numpy(uniforms[part])).numpy()
    return tokens, errors


def _reason(status: RowStatus, row: int, batch: SamplingBatch) -> str:
    own = batch.rules.ruling_out.get(row) if batch.rules is not None and status is RowStatus.RULED_OUT else None
    return own or _REASONS[status]


def _errors(logits: Tensor, batch: SamplingBatch) -> dict[int, str]:
    peak = logits.amax(dim=1)  # NaN if any is NaN
    errors: dict[int, str] = {}
    for row in torch.nonzero(~torch.isfinite(peak)).flatten().tolist():
        value = peak[row].item()
        status = RowStatus.NAN if value != value else RowStatus.INFINITE if value > 0 else RowStatus.RULED_OUT
        errors[row] = _reason(status, row, batch)
    return errors


def _probabilities(logits: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """[rows, vocab] float64 after temperature and min_p; not normalised again after min_p."""
    scaled = logits.double()
    scaled -= scaled.amax(dim=1, keepdim=True)  # before the division, which then cannot overflow upwards
    scaled /= torch.from_numpy(batch.temperature[rows].astype(np.float64))[:, None]
    # softmax works row by row with an order of its own for each, whatever the number of rows; `sum` does not.
    probs = torch.softmax(scaled, dim=1)
    least = torch.from_numpy(batch.min_p[rows].astype(np.float64))[:, None] * probs.amax(dim=1, keepdim=True)
    return probs.masked_fill_(probs < least, 0.0)


def _draw_by_index(logits: Tensor, batch: SamplingBatch, rows: NDArray[np.int64], uniforms: Tensor) -> Tensor:
    """[rows] int64, when neither top_k nor top_p binds: walk the cumulative distribution in order of token ids."""
    return _invert(_probabilities(logits, batch, rows).cumsum(dim=1), uniforms)


def _draw_by_rank(logits: Tensor, batch: SamplingBatch, rows: NDArray[np.int64], uniforms: Tensor) -> Tensor:
    """[rows] int64, with top_k or top_p: walk it from the likeliest token down, so that what is kept comes first."""
    # Sorted by logit, not by probability: equal probabilities may come from logits that differ.
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    probs = _probabilities(logits, batch, rows).gather(1, order)
    vocab_size = logits.shape[1]
    top_k = torch.from_numpy(batch.top_k[rows].astype(np.int64))[:, None]
    top_k = torch.where(top_k > 0, top_k, vocab_size)
    probs.masked_fill_(torch.arange(vocab_size) >= top_k, 0.0)
    cdf = probs.cumsum(dim=1)
    # The shortest run that reaches top_p of the mass: a token stays when the mass before it falls short of that.
    top_p = torch.from_numpy(batch.top_p[rows].astype(np.float64))[:, None]
    before = torch.zeros_like(cdf)
    before[:, 1:] = cdf[:, :-1]
    cut = before >= top_p * cdf[:, -1:]
    cut[:, 0] = False  # top_p may round to nothing; the likeliest token always stays
    cdf = probs.masked_fill_(cut, 0.0).cumsum(dim=1)
    return order.gather(1, _invert(cdf, uniforms)[:, None])[:, 0]


def _invert(cdf: Tensor, uniforms: Tensor) -> Tensor:
    """[rows] int64: the first entry whose cumulative mass exceeds `uniform * total`; it has a mass above zero."""
    target = uniforms[:, None] * cdf[:, -1:]
    # uniform < 1, but the product may round up to the total: then it is the last entry that added mass.
    target = torch.minimum(target, torch.nextafter(cdf[:, -1:], torch.zeros_like(target)))
    return torch.searchsorted(cdf, target, right=True)[:, 0]
