"""Change logits as requests ask, before anything is drawn from them."""

from __future__ import annotations

import torch
from torch import Tensor

from vtoken.schedule.plan import LogitRules


def apply_rules(logits: Tensor, rules: LogitRules) -> None:
    """Change `logits` [N, vocab] float32 in place, rows without rules not at all. In vLLM's order: allowed tokens and
    biases, then the repetition penalty, then those on frequency and presence. Each token of a row is penalised once."""
    for row, allowed in rules.allowed:
        tokens = torch.from_numpy(allowed.astype("int64"))
        kept = logits[row, tokens]
        logits[row] = -torch.inf
        logits[row, tokens] = kept
    if len(rules.bias):
        where = torch.from_numpy(rules.bias_rows), torch.from_numpy(rules.bias_tokens)
        logits.index_put_(where, torch.from_numpy(rules.bias), accumulate=True)
    if not len(rules.seen_rows):
        return
    rows, tokens = torch.from_numpy(rules.seen_rows), torch.from_numpy(rules.seen_tokens)
    counts, penalties = torch.from_numpy(rules.seen_counts), torch.from_numpy(rules.penalties)
    repetition, presence, frequency = penalties[rows].unbind(dim=1)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    logits[rows, tokens] = values
