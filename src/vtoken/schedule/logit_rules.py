"""What requests want changed in their logits before a token is drawn: penalties, biases, tokens that may not come.

Rules follow from the text alone, which is known whatever the cache gave, whatever died and however often it was
computed again. So they are the same under prefix hits, eviction and preemption.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from vtoken.base.sampling_params import SamplingParams
from vtoken.schedule.plan import LogitRules
from vtoken.schedule.sequence import Sequence

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


class RequestRules:
    """The rules of one request, and how often each of its choices has said what.

    Args:
        prompt: its tokens.
        ends: the tokens that would end an answer.
    """

    def __init__(self, params: SamplingParams, prompt: SequenceOf[int], ends: Iterable[int]) -> None:
        bias = params.logit_bias or {}
        self.bias_tokens = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else np.unique(np.array(allowed, np.int32))
        self.ends = np.unique(np.fromiter(ends, np.int32))
        self.min_tokens = params.min_tokens
        self.penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        # Only the repetition penalty counts what the prompt says.
        self._prompt = dict.fromkeys(prompt, 0) if params.repetition_penalty != 1.0 else {}
        self._counts: dict[int, dict[int, int]] = {}  # choice -> token -> times in the answer, 0 = in the prompt alone
        self._num_counted: dict[int, int] = {}

    @property
    def has_penalties(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0)

    def seen(self, sequence: Sequence) -> dict[int, int]:
        """Token -> how often the choice has said it, 0 = only the prompt has."""
        counts = self._counts.setdefault(sequence.choice, self._prompt.copy())
        known = self._num_counted.get(sequence.choice, 0)
        for token in islice(sequence.token_ids, sequence.request.num_prompt_tokens + known, None):
            counts[token] = counts.get(token, 0) + 1
        self._num_counted[sequence.choice] = sequence.num_output_tokens
        return counts


def ends_of(params: SamplingParams, eos: Iterable[int]) -> set[int]:
    """The tokens that end an answer."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos)}


def rules_of(params: SamplingParams, prompt: SequenceOf[int], eos: Iterable[int]) -> RequestRules | None:
    """None for a request that takes its logits as they are."""
    ends = ends_of(params, eos) if params.min_tokens else set()
    rules = RequestRules(params, prompt, ends)
    is_plain = not (rules.has_penalties or len(rules.bias) or len(rules.ends)) and rules.allowed is None
    return None if is_plain else rules


def order_rules(draws: SequenceOf[Sequence]) -> LogitRules | None:
    """The rules of the draws of a plan, in their order; None if no draw has any."""
    rows = [row for row, sequence in enumerate(draws) if sequence.request.rules is not None]
    if not rows:
        return None
    biased: list[tuple[int, NDArray[np.int32], NDArray[np.float32]]] = []
    allowed: list[tuple[int, NDArray[np.int32]]] = []
    seen: list[tuple[int, dict[int, int]]] = []
    penalties = np.tile(np.array([1.0, 0.0, 0.0], np.float32), (len(draws), 1))
    for row in rows:
        sequence = draws[row]
        rules = sequence.request.rules
        assert rules is not None, "such rows were left out"
        if len(rules.bias):
            biased.append((row, rules.bias_tokens, rules.bias))
        if len(rules.ends) and sequence.num_output_tokens < rules.min_tokens:
            biased.append((row, rules.ends, np.full(len(rules.ends), -np.inf, np.float32)))
        if rules.allowed is not None:
            allowed.append((row, rules.allowed))
        if rules.has_penalties:
            penalties[row] = rules.penalties
            seen.append((row, rules.seen(sequence)))
    return LogitRules(
        bias_rows=np.repeat([row for row, _, _ in biased], [len(ids) for _, ids, _ in biased]).astype(np.int64),
        bias_tokens=np.concatenate([_NO_IDS, *(ids for _, ids, _ in biased)]).astype(np.int64),
        bias=np.concatenate([np.empty(0, np.float32), *(values for _, _, values in biased)]),
        allowed=tuple(allowed),
        seen_rows=np.repeat([row for row, _ in seen], [len(counts) for _, counts in seen]).astype(np.int64),
        seen_tokens=np.array([token for _, counts in seen for token in counts], np.int64),
        seen_counts=np.array([count for _, counts in seen for count in counts.values()], np.float32),
        penalties=penalties,
    )
