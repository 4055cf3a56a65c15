"""The contract between scheduler and executor: plans go down, facts come up.

Both are frozen, and their arrays are snapshots: no executor can see the books change under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.copy import Copy
from vtoken.policies.statistics import Statistic

MIN_TEMPERATURE = 1e-5  # below it draws are greedy, as in vLLM: dividing by it would overflow


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """The only tokens that may be drawn in some rows, as bits: bit `i % 32` of `words[k, i // 32]` is token `i`."""

    rows: NDArray[np.int64]  # [k] ascending
    words: NDArray[np.uint32]  # [k, W] 32 * W may differ from the width of the logits: what has no bit may not be drawn


@dataclass(frozen=True, eq=False)
class RowProcessors:
    """A request's own functions for one row. They are not data: an executor in another process would need another way
    to them, and refuses such a request until it has one."""

    row: int
    functions: tuple[Callable[..., Any], ...]
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, eq=False)
class LogitRules:
    """What is changed in logits before tokens are drawn; rows are draws. See `worker.logit_rules`."""

    bias_rows: NDArray[np.int64]  # [B]
    bias_tokens: NDArray[np.int64]  # [B]
    bias: NDArray[np.float32]  # [B] added; -inf rules a token out
    allowed: tuple[tuple[int, NDArray[np.int32]], ...]  # (row, the only tokens that may be drawn)
    seen_rows: NDArray[np.int64]  # [C]
    seen_tokens: NDArray[np.int64]  # [C] of the row's text, each once
    seen_counts: NDArray[np.float32]  # [C] how often in the answer, 0 = in the prompt alone
    penalties: NDArray[np.float32]  # [N, 3] repetition (1 = off), presence, frequency (0 = off)
    masks: TokenMasks | None = None
    processors: tuple[RowProcessors, ...] = ()
    ruling_out: Mapping[int, str] = field(default_factory=dict)  # row -> what to say if no token is left


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """What to draw after the forward pass: one entry a draw, N in all.

    A slice draws when its last token is the last known one of its sequence; a prompt with n choices draws n times
    from the same logits.
    """

    slices: NDArray[np.int32]  # [N] the slice whose last token's logits are drawn from
    temperature: NDArray[np.float32]  # [N] see `is_greedy`
    top_k: NDArray[np.int32]  # [N] 0 = off
    top_p: NDArray[np.float32]  # [N] 1 = off
    min_p: NDArray[np.float32]  # [N] 0 = off
    seeds: NDArray[np.uint64]  # [N] the request's seed
    choices: NDArray[np.int32]  # [N] index of the choice within its request
    indices: NDArray[np.int32]  # [N] how many tokens the choice has generated before this one
    rules: LogitRules | None = None
    scored: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # draws whose token is scored
    num_top: int = 0  # likeliest tokens that are named beside them: the most that one of them asks for
    searched: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # draws that are beams
    num_candidates: int = 0  # continuations that are named of each: the most that one of them asks for

    def __len__(self) -> int:
        return len(self.slices)

    @property
    def is_greedy(self) -> NDArray[np.bool_]:
        """[N] draws so cold that the likeliest token is taken."""
        return self.temperature < MIN_TEMPERATURE


@dataclass(frozen=True, eq=False)
class ScoringBatch:
    """Known tokens whose log-probability is wanted: n in all."""

    after: NDArray[np.int32]  # [n] the flat tokens of the plan that they come after, ascending
    targets: NDArray[np.int32]  # [n] the tokens themselves
    num_top: int = 0  # likeliest tokens that are named beside them: the most that one of them asks for

    def __len__(self) -> int:
        return len(self.after)


NOTHING_TO_SCORE = ScoringBatch(np.zeros(0, np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True, eq=False)
class StatisticOrder:
    """One statistic that some slices of a plan want, one entry a slice, n in all."""

    statistic: Statistic
    slices: NDArray[np.int32]  # [n] slices of the plan that want it, ascending
    # [n] AttentionStatistic: queries at lower positions are not counted.
    #     CacheStatistic that `is_fixed`: tokens at lower positions need no value, theirs is known. Else: unused.
    first: NDArray[np.int64]
    # FutureAttention only. It looks back on queries, which the executor remembers from step to step: every slice of a
    # sequence has to be ordered, from `window` queries before the decision at the latest. Else None.
    owners: NDArray[np.int64] | None = None  # [n] number of the sequence; no other one ever has the same
    due: NDArray[np.bool_] | None = None  # [n] whether values are wanted after this step; None = everywhere

    def __len__(self) -> int:
        return len(self.slices)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: S slices (a run of consecutive tokens of one sequence each), T tokens in all.

    Slice `s` owns the flat tokens `[starts[s], starts[s + 1])`. Its past is described by `block_tables[s]` and
    `masks[s]`: bit `i % 32` of `masks[s, e, i // 32]` says that slot `block_tables[s, e] * block_size + i` holds a past
    token that the slice may read. The slice's own tokens are in no mask: they are attended to densely and causally, and
    the executor writes their KV to `write_slots` before it attends, for all slices of the plan, since a slice may match
    blocks that another one writes in the same plan.
    """

    step: int
    block_size: int
    copies: tuple[Copy, ...]  # run in order before the forward pass
    lanes: NDArray[np.int32]  # [S] for logs and statistics only
    starts: NDArray[np.int32]  # [S + 1]
    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    write_slots: NDArray[np.int64]  # [T]
    write_rows: NDArray[np.int32]  # [T] the row each new token got in its lane
    block_tables: NDArray[np.int32]  # [S, E], -1 = EMPTY
    masks: NDArray[np.uint32]  # [S, E, ceil(block_size / 32)]
    past_live: NDArray[np.int32]  # [S] set bits of each slice's masks
    sampling: SamplingBatch
    # [S, E * block_size] position of every live past row, or None when row = position in every slice.
    row_positions: NDArray[np.int32] | None = None
    # At most one order per statistic; a slice may be in several.
    statistics: tuple[StatisticOrder, ...] = ()
    scoring: ScoringBatch = NOTHING_TO_SCORE
    # Tickets of earlier plans' copies whose end the books have not heard of. One that the executor does not know, since
    # a step failed before it came there or its result was lost, has failed.
    awaited: tuple[int, ...] = ()

    # [S] the length that each slice's sequence turns by, see `RopeLengths`; None where the model has no such thing.
    rope_lengths: NDArray[np.int32] | None = None

    @property
    def num_slices(self) -> int:
        return len(self.lanes)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What the model says of n tokens at their places, by its logits as they are: without rules or temperature."""

    logprobs: NDArray[np.float64]  # [n] natural logarithms; NaN where the logits are no numbers
    ranks: NDArray[np.int32]  # [n] 1 = no other token is likelier
    top_tokens: NDArray[np.int32]  # [n, num_top] the likeliest tokens, best first
    top_logprobs: NDArray[np.float64]  # [n, num_top]

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def num_top(self) -> int:
        return int(self.top_tokens.shape[1])

    @classmethod
    def empty(cls, num_tokens: int, num_top: int) -> TokenScores:
        """Room for scores that are not known yet: NaN."""
        return cls(
            np.full(num_tokens, np.nan),
            np.zeros(num_tokens, np.int32),
            np.zeros((num_tokens, num_top), np.int32),
            np.full((num_tokens, num_top), np.nan),
        )

    def enter(self, where: NDArray[np.int64], others: TokenScores) -> None:
        """Take the scores of others at these places, as many of their likeliest tokens as there is room for."""
        num_top = self.num_top
        self.logprobs[where], self.ranks[where] = others.logprobs, others.ranks
        self.top_tokens[where] = others.top_tokens[:, :num_top]
        self.top_logprobs[where] = others.top_logprobs[:, :num_top]

    def of(self, which: NDArray[np.bool_] | slice, num_top: int | None = None) -> TokenScores:
        """Those of some tokens, with all of the likeliest ones or the first `num_top`."""
        top = slice(num_top)
        return TokenScores(
            self.logprobs[which], self.ranks[which], self.top_tokens[which, top], self.top_logprobs[which, top]
        )


@dataclass(frozen=True, eq=False)
class Candidates:
    """The likeliest tokens to go on with, best first, by the model's logits less the tokens that rules forbid."""

    tokens: NDArray[np.int32]  # [n, num_candidates]
    logprobs: NDArray[np.float64]  # [n, num_candidates] natural logarithms; -inf for what may not come


NO_CANDIDATES = Candidates(np.zeros((0, 0), np.int32), np.zeros((0, 0)))
NO_SCORES = TokenScores.empty(0, 0)


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step found out. The scheduler alone turns it into book entries."""

    step: int
    tokens: NDArray[np.int32]  # [N] one a draw, in the order of `StepPlan.sampling`
    # Draws that failed (non-finite logits, ...): index of the draw -> the reason in the user's words.
    errors: dict[int, str] = field(default_factory=dict)
    # Name of a statistic ordered -> [n, rows], one line a slice of the order: column r is row r of its lane, and there
    # are at least as many columns as those slices use rows. An AttentionStatistic says what the slice's queries add; a
    # CacheStatistic what holds now, NaN where no value was asked for (dead rows, positions below `first`).
    statistics: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    scores: TokenScores = NO_SCORES  # in the order of `StepPlan.scoring`
    drawn: TokenScores = NO_SCORES  # of the tokens drawn, in the order of `SamplingBatch.scored`
    candidates: Candidates = NO_CANDIDATES  # in the order of `SamplingBatch.searched`; `tokens` says nothing of those
    ended: tuple[int, ...] = ()  # tickets of beside-copies that are done
    failed: tuple[int, ...] = ()  # tickets of beside-copies that never will be
