"""Which beams live on, decided when every beam of a request has named its likeliest continuations.

The rules are those of `transformers` (`GenerationMixin._beam_search`), so that texts and scores are the same: `width`
beams run; all their continuations are ranked by the log-probability of the whole answer; one that ends is a finished
answer if it is among the first `width`, and the first `width` of the others run on. The score of a finished answer is
its log-probability divided by `length ** length_penalty`.

Nothing here knows of sequences or blocks: `beams` turns what is decided into forks and releases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vtoken.base.sampling_params import SamplingParams
from vtoken.schedule.sequence import FinishReason


@dataclass(frozen=True)
class Continuation:
    """A beam and the token that it may go on with."""

    beam: int
    token: int
    total: float  # log-probability of the answer with it
    ends: FinishReason | None = None


@dataclass(frozen=True)
class FinishedAnswer:
    token_ids: list[int]
    total: float  # its log-probability
    score: float
    reason: FinishReason
    stop_reason: int | None = None
    died_at: dict[int, int] = field(default_factory=dict)  # see `Sequence.died_at`


class BeamSearch:
    """The search of one request. `ends` are the tokens that end an answer; at `max_tokens` it is cut."""

    def __init__(self, params: SamplingParams, max_tokens: int, ends: Iterable[int]) -> None:
        self.width = params.num_choices
        self.ends = frozenset(ends)
        self.finished: list[FinishedAnswer] = []  # `width` at most, best first
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens
        self._totals = [0.0] * self.width  # of the running beams, best first once they differ
        self._offers: dict[int, tuple[NDArray[np.int32], NDArray[np.float64]]] = {}

    @property
    def num_candidates(self) -> int:
        """Continuations that a beam names: enough for `width` of all to run on, however many of them end."""
        return max(2, 1 + len(self.ends)) * self.width

    def offer(self, beam: int, tokens: NDArray[np.int32], logprobs: NDArray[np.float64]) -> bool:
        """A beam's likeliest continuations, best first: [num_candidates] each. Returns whether all beams have named
        theirs."""
        assert beam not in self._offers, "a beam names its continuations once"
        self._offers[beam] = tokens, logprobs
        return len(self._offers) == self.width

    def withdraw(self) -> None:
        """All beams are computed again, so all will name their continuations again."""
        self._offers = {}

    def decide(self, length: int) -> tuple[list[Continuation], list[Continuation]]:
        """(answers that have ended, beams that run on), now that answers have `length` tokens. Either `width` beams run
        on, best first, or none do."""
        # In the beginning all beams are the same, so one of them speaks for all.
        offers = {0: self._offers[0]} if length == 1 else self._offers
        self._offers = {}
        named = [
            Continuation(beam, token, self._totals[beam] + logprob, self._ends(token, length))
            for beam, (tokens, logprobs) in offers.items()
            for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ]
        best = sorted(named, key=lambda each: (-each.total, each.beam))[: self.num_candidates]
        ended = [each for each in best[: self.width] if each.ends is not None]
        running = [each for each in best if each.ends is None][: self.width]
        return ended, running

    def _ends(self, token: int, length: int) -> FinishReason | None:
        if token in self.ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self._max_tokens else None

    def score(self, total: float, length: int) -> float:
        return float(total / length**self._length_penalty)

    def finish(self, answers: Iterable[FinishedAnswer]) -> None:
        """Enter answers that have ended; the best `width` of all are kept."""
        self.finished = sorted([*self.finished, *answers], key=lambda answer: -answer.score)[: self.width]

    def is_over(self, running: list[Continuation], length: int) -> bool:
        """Whether nothing that these beams may become is worth going on for; they have `length` tokens."""
        if not running:
            return True
        if len(self.finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        hopes = self._early_stopping == "never" and self._length_penalty > 0
        return self.score(running[0].total, self._max_tokens if hopes else length) <= self.finished[-1].score

    def assign(self, running: list[Continuation], length: int) -> dict[int, Continuation]:
        """Beam -> the continuation that it is from now on. A beam goes on from itself where it can; those from which
        nothing goes on take over from others. In the beginning, when all are the same, nobody has to."""
        heirs: dict[int, Continuation] = {}
        left = []
        for each in running:
            if length > 1 and each.beam not in heirs:
                heirs[each.beam] = each
            else:
                left.append(each)
        free = (beam for beam in range(self.width) if beam not in heirs)
        heirs |= dict(zip(free, left, strict=False))
        self._totals = [heirs[beam].total for beam in range(self.width)]
        return heirs
