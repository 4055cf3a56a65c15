"""Log-probabilities of known tokens, from the hidden states that come before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.schedule.plan import ScoringBatch

MOST_ROWS: Final = 64  # of logits at once, whatever the length of a chunk
_MOST_ELEMENTS: Final = 2**22  # of a large vocabulary fewer rows: 32 MiB as float64


def score(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, batch: ScoringBatch) -> NDArray[np.float64]:
    """[n] natural logarithms of the probabilities of `batch.targets`, of the softmax without temperature; NaN where the
    logits hold NaN or +infinity.

    `logits_of` makes logits [rows, vocab] float32 of hidden states [rows, hidden_size]; `hidden` [T, hidden_size] is of
    the plan's tokens. A score does not depend on how rows are put together: each row is reduced alone, in float64.
    """
    found = np.empty(len(batch))
    rows = MOST_ROWS
    begin = 0
    while begin < len(batch):
        part = slice(begin, begin + rows)
        logits = logits_of(hidden[torch.from_numpy(batch.after[part].astype(np.int64))])
        targets = torch.from_numpy(batch.targets[part].astype(np.int64))
        found[part] = logits.double().log_softmax(dim=1).gather(1, targets[:, None])[:, 0].numpy()
        begin += rows
        rows = max(1, min(MOST_ROWS, _MOST_ELEMENTS // logits.shape[1]))
    return found
