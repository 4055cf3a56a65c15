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
from vtoken.schedule.plan import LogitRules, RowProcessors, TokenMasks
from vtoken.schedule.sequence import Sequence
from vtoken.schedule.text_rules import NO_TEXT_RULES, BadWords, TextRules, TokenConstraint

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


class RequestRules:
    """The rules of one request, and how often each of its choices has said what.

    Args:
        prompt: its tokens.
        ends: the tokens that would end an answer before it has `min_tokens`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: SequenceOf[int],
        ends: Iterable[int],
        text: TextRules = NO_TEXT_RULES,
    ) -> None:
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
        self.bad_words = BadWords(text.bad_words)
        self.processors = params.logits_processors
        self._constraint = text.constraint
        self._constraints: dict[int, TokenConstraint] = {}  # choice -> where its answer stands

    @property
    def has_penalties(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0)

    @property
    def is_plain(self) -> bool:
        """Whether they change nothing."""
        return not (
            self.has_penalties
            or len(self.bias)
            or len(self.ends)
            or self.allowed is not None
            or self.bad_words
            or self.is_constrained
            or self.processors
        )

    @property
    def is_constrained(self) -> bool:
        return self._constraint is not None

    def constraint(self, sequence: Sequence) -> TokenConstraint:
        """Where the answer of a constrained request stands, as far as it is known."""
        assert self._constraint is not None, "asked of a request without a constraint"
        found = self._constraints.get(sequence.choice)
        if found is None:
            found = self._constraints[sequence.choice] = self._constraint.copy()
        found.follow(sequence.output_token_ids)
        return found

    def is_over(self, sequence: Sequence) -> bool:
        """Whether an answer has the form it must have, and nothing could be added. Then it ends, unless it is too short
        for `min_tokens`: that is a contradiction, of which its next draw says so."""
        return sequence.num_output_tokens >= self.min_tokens and self.constraint(sequence).is_over

    def ruling_out(self, sequence: Sequence) -> str:
        """What to say if a draw finds every token ruled out, in the user's words; "" if no rule does such a thing."""
        constraint = self._constraints.get(sequence.choice)
        if constraint is not None and constraint.error is not None:
            return f"structured_outputs: {constraint.error}"
        names = {
            "structured_outputs": self.is_constrained,
            "allowed_token_ids": self.allowed is not None,
            "bad_words": bool(self.bad_words),
            f"min_tokens={self.min_tokens}": bool(len(self.ends)) and sequence.num_output_tokens < self.min_tokens,
            "logits_processors": bool(self.processors),
        }
        found = [name for name, is_there in names.items() if is_there]
        return f"{' and '.join(found)} ruled out every token: none is left to draw" if found else ""

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


def rules_of(
    params: SamplingParams, prompt: SequenceOf[int], eos: Iterable[int], text: TextRules = NO_TEXT_RULES
) -> RequestRules | None:
    """None for a request that takes its logits as they are."""
    rules = RequestRules(params, prompt, ends_of(params, eos) if params.min_tokens else (), text)
    return None if rules.is_plain else rules


def order_rules(draws: SequenceOf[Sequence]) -> LogitRules | None:
    """The rules of the draws of a plan, in their order; None if no draw has any."""
    rows = [row for row, sequence in enumerate(draws) if sequence.request.rules is not None]
    if not rows:
        return None
    biased: list[tuple[int, NDArray[np.int32], NDArray[np.float32]]] = []
    allowed: list[tuple[int, NDArray[np.int32]]] = []
    seen: list[tuple[int, dict[int, int]]] = []
    constrained: list[tuple[int, TokenConstraint]] = []
    processors: list[RowProcessors] = []
    ruling_out: dict[int, str] = {}
    penalties = np.tile(np.array([1.0, 0.0, 0.0], np.float32), (len(draws), 1))
    for row in rows:
        sequence = draws[row]
        rules = sequence.request.rules
        assert rules is not None, "such rows were left out"
        if len(rules.bias):
            biased.append((row, rules.bias_tokens, rules.bias))
        if len(rules.ends) and sequence.num_output_tokens < rules.min_tokens:
            biased.append((row, rules.ends, _ruled_out(rules.ends)))
        if rules.bad_words:
            completing = rules.bad_words.completing(sequence.token_ids, sequence.request.num_prompt_tokens)
            banned = np.concatenate((rules.bad_words.single, np.array(completing, np.int32)))
            biased.append((row, banned, _ruled_out(banned)))
        if rules.allowed is not None:
            allowed.append((row, rules.allowed))
        if rules.has_penalties:
            penalties[row] = rules.penalties
            seen.append((row, rules.seen(sequence)))
        if rules.is_constrained:
            constrained.append((row, rules.constraint(sequence)))
        if rules.processors:
            ids = list(sequence.request.prompt_token_ids), sequence.output_token_ids
            processors.append(RowProcessors(row, rules.processors, *ids))
        reason = rules.ruling_out(sequence)
        if reason:
            ruling_out[row] = reason
    return LogitRules(
        bias_rows=np.repeat([row for row, _, _ in biased], [len(ids) for _, ids, _ in biased]).astype(np.int64),
        bias_tokens=np.concatenate([_NO_IDS, *(ids for _, ids, _ in biased)]).astype(np.int64),
        bias=np.concatenate([np.empty(0, np.float32), *(values for _, _, values in biased)]),
        allowed=tuple(allowed),
        seen_rows=np.repeat([row for row, _ in seen], [len(counts) for _, counts in seen]).astype(np.int64),
        seen_tokens=np.array([token for _, counts in seen for token in counts], np.int64),
        seen_counts=np.array([count for _, counts in seen for count in counts.values()], np.float32),
        penalties=penalties,
        masks=_masks(constrained),
        processors=tuple(processors),
        ruling_out=ruling_out,
    )


def _ruled_out(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.full(len(tokens), -np.inf, np.float32)


def _masks(constrained: list[tuple[int, TokenConstraint]]) -> TokenMasks | None:
    if not constrained:
        return None
    words = np.empty((len(constrained), constrained[0][1].num_words), np.uint32)
    for line, (_, constraint) in zip(words, constrained, strict=True):
        constraint.fill(line)
    return TokenMasks(np.array([row for row, _ in constrained], np.int64), words)
