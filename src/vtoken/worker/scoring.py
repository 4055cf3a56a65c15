"""Scores of tokens, known or just drawn, from the logits of the places where they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.schedule.plan import NO_SCORES, Candidates, ScoringBatch, TokenScores

MOST_ROWS: Final = 64  # of logits at once, whatever the length of a chunk
_MOST_ELEMENTS: Final = 2**22  # of a large vocabulary fewer rows: 32 MiB as float64


def score(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, batch: ScoringBatch) -> TokenScores:
    """Scores of `batch.targets`, from the hidden states that come before them.

    `logits_of` makes logits [rows, vocab] float32 of hidden states [rows, hidden_size]; `hidden` [T, hidden_size] is of
    the plan's tokens.
    """
    if not len(batch):
        return NO_SCORES
    found = TokenScores.empty(len(batch), batch.num_top)
    rows = MOST_ROWS
    begin = 0
    while begin < len(batch):
        part = np.arange(begin, min(begin + rows, len(batch)))
        logits = logits_of(hidden[torch.from_numpy(batch.after[part].astype(np.int64))])
        found.enter(part, score_rows(logits, batch.targets[part], batch.num_top))
        begin += rows
        rows = rows_at_once(logits)
    return found


def score_rows(logits: Tensor, tokens: NDArray[np.int32], num_top: int) -> TokenScores:
    """Scores of `tokens` [n], one for each row of `logits` [n, vocab] float32; NaN where a row holds NaN or +infinity.
    `num_top` is at most the size of the vocabulary.

    A score does not depend on how rows are put together: each row is reduced alone, in float64.
    """
    found = TokenScores.empty(len(tokens), num_top)
    rows = rows_at_once(logits)
    for begin in range(0, len(tokens), rows):
        part = slice(begin, begin + rows)
        values = logits[part].double().log_softmax(dim=1)
        own = values.gather(1, torch.from_numpy(tokens[part].astype(np.int64))[:, None])  # [rows, 1]
        top = values.topk(num_top, dim=1)
        found.logprobs[part], found.ranks[part] = own[:, 0].numpy(), ((values > own).sum(dim=1) + 1).numpy()
        found.top_tokens[part], found.top_logprobs[part] = top.indices.numpy(), top.values.numpy()
    return found


def candidates(logits: Tensor, ruled: Tensor, num_candidates: int) -> Candidates:
    """The likeliest tokens of each row of `logits` [n, vocab] float32. Those that rules have forbidden, -inf in `ruled`
    [n, vocab], may not come, which makes no other one likelier."""
    found = Candidates(np.empty((len(logits), num_candidates), np.int32), np.empty((len(logits), num_candidates)))
    rows = rows_at_once(logits)
    for begin in range(0, len(logits), rows):
        part = slice(begin, begin + rows)
        values = logits[part].double().log_softmax(dim=1).masked_fill_(ruled[part] == -torch.inf, -torch.inf)
        top = values.topk(num_candidates, dim=1)
        found.tokens[part], found.logprobs[part] = top.indices.numpy(), top.values.numpy()
    return found


def rows_at_once(logits: Tensor) -> int:
    """How many rows of `logits` [n, vocab] are made float64 at once."""
    return max(1, min(MOST_ROWS, _MOST_ELEMENTS // logits.shape[1]))
