"""Change logits as requests ask, before anything is drawn from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from vtoken.base.errors import describe
from vtoken.base.logits_processors import takes_prompt
from vtoken.kernels.masking import mask_logits
from vtoken.schedule.plan import LogitRules, RowProcessors, TokenMasks


def apply_rules(logits: Tensor, rules: LogitRules, *, compiled: bool = False) -> dict[int, str]:
    """Change `logits` [N, vocab] float32 in place, rows without rules not at all.

    In vLLM's order: allowed tokens and biases, then the repetition penalty, then those on frequency and presence, each
    token of a row once; then the requests' own functions. Masks come last: what they promise nothing can undo.
    Returns the rows whose own functions failed, with the reason; they are all NaN now.
    """
    _bias(logits, rules)
    _penalise(logits, rules)
    errors = {}
    for processors in rules.processors:
        error = _process(logits[processors.row], processors)
        if error is not None:
            logits[processors.row] = torch.nan
            errors[processors.row] = f"logits_processors: {error}"
    if rules.masks is not None:
        _mask(logits, rules.masks, compiled)
    return errors


def _bias(logits: Tensor, rules: LogitRules) -> None:
    for row, allowed in rules.allowed:
        tokens = torch.from_numpy(allowed.astype("int64"))
        kept = logits[row, tokens]
        logits[row] = -torch.inf
        logits[row, tokens] = kept
    if len(rules.bias):
        where = torch.from_numpy(rules.bias_rows), torch.from_numpy(rules.bias_tokens)
        logits.index_put_(where, torch.from_numpy(rules.bias), accumulate=True)


def _penalise(logits: Tensor, rules: LogitRules) -> None:
    if not len(rules.seen_rows):
        return
    rows, tokens = torch.from_numpy(rules.seen_rows), torch.from_numpy(rules.seen_tokens)
    counts, penalties = torch.from_numpy(rules.seen_counts), torch.from_numpy(rules.penalties)
    repetition, presence, frequency = penalties[rows].unbind(dim=1)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    logits[rows, tokens] = values


def _process(row: Tensor, processors: RowProcessors) -> str | None:
    """Let a request's functions change its row [vocab]. Returns why that failed, if it did."""
    logits = row.clone()
    for number, function in enumerate(processors.functions):
        name = f"function {number} ({_name(function)})"
        ids = [processors.prompt, processors.answer] if takes_prompt(function) else [processors.answer]
        try:
            found = function(*map(list, ids), logits)  # copies, lest one function changes what the next one sees
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and CancelledError too: it is one request's function, not ours
            return f"{name} raised {describe(error)}"
        if not _is_row(found, row):
            return (
                f"{name} was to return logits, a float tensor of shape {tuple(row.shape)}; it returned {_form(found)}"
            )
        logits = found.to(row)
        if not bool((logits < torch.inf).all()):  # false for NaN too
            return f"{name} returned logits with NaN or infinite values; -inf is what rules a token out"
    row.copy_(logits)
    return None


def _is_row(found: object, row: Tensor) -> TypeGuard[Tensor]:
    """Whether it is a dense tensor of numbers that can be one of `row`: neither sparse nor one without content."""
    return (
        isinstance(found, Tensor)
        and found.shape == row.shape
        and found.is_floating_point()
        and found.layout is torch.strided
        and not found.is_meta
    )


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _form(found: object) -> str:
    if not isinstance(found, Tensor):
        return type(found).__name__
    kind = "a meta tensor" if found.is_meta else "one" if found.layout is torch.strided else "a sparse one"
    return f"{kind} of shape {tuple(found.shape)} and {found.dtype}"


def _mask(logits: Tensor, masks: TokenMasks, compiled: bool) -> None:
    if compiled:
        mask_logits(logits, masks.rows, masks.words)
        return
    width = logits.shape[1]
    for row, words in zip(masks.rows.tolist(), masks.words, strict=True):
        bits = np.zeros(width, np.bool_)
        found = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")[:width]
        bits[: len(found)] = found
        logits[row].masked_fill_(torch.from_numpy(~bits), -torch.inf)
