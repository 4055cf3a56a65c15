"""`Request` and its `Sequence`s: what the scheduler knows of one demand and of each of its choices."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from vtoken.base.sampling_params import MAX_N, SamplingParams
from vtoken.memory.prefix_cache import BlockHashes
from vtoken.schedule.plan import TokenScores
from vtoken.schedule.retention import Retention

if TYPE_CHECKING:
    from vtoken.schedule.beam_search import BeamSearch
    from vtoken.schedule.logit_rules import RequestRules


class Status(Enum):
    WAITING = "waiting"  # never ran
    RUNNING = "running"  # has blocks
    PREEMPTED = "preempted"  # has no blocks; everything will be recomputed
    SWAPPED = "swapped"  # its blocks are on the host
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the room in max_model_len
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Sequence:
    """One choice of a request: the prompt and what was generated after it."""

    request: Request
    choice: int
    token_ids: list[int]  # prompt and answer; empty before a choice has forked from its leader
    hashes: BlockHashes
    lane: int | None = None  # where it lies in the books; None while it has no blocks
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the one of the request's own stop tokens or texts that ended it
    has_stop_id: bool = False  # whether the last token is one that ended it: the model's or the request's own
    # Position -> length of the text at which the token was evicted. Kept here while the sequence has no lane, and in
    # the end, for the answer; otherwise the books have it.
    died_at: dict[int, int] = field(default_factory=dict)
    # Up to this length of the text it is settled which tokens die: when it is computed again, nobody is asked again.
    settled: int = 0
    scores: list[TokenScores] = field(default_factory=list)  # one a token of the answer, where its request wants them
    total_logprob: float = 0.0  # of the answer, where its request wants scores or searches beams

    @property
    def number(self) -> int:
        """Of this sequence alone, among all that the engine has ever run."""
        return self.request.index * MAX_N + self.choice

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return max(0, len(self.token_ids) - self.request.num_prompt_tokens)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False)
class Request:
    """One demand: a prompt, how to draw from it, and how often.

    `index` is the order of arrival, `seed` the one its draws use (the user's, or one made for it).
    """

    request_id: str
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    seed: int
    index: int
    arrival_time: float
    block_size: int
    cache_salt: str | None = None
    retention: Retention | None = None  # None: every token is kept
    # Its prompt runs in fewer blocks than it would fill, so tokens of it die at fixed places, whatever the trigger.
    is_tight: bool = False
    rope_length: int | None = None  # what its choices turn by, see `RopeLengths`; None: as all sequences of the model
    started_over_at: int = 0  # length at which it was computed again to learn what may die
    status: Status = Status.WAITING
    error: str | None = None
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache gave at the first admission
    num_preemptions: int = 0
    num_passes: int = 0  # later requests admitted while this one waited at the head of the queue
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    stop_token_ids: frozenset[int] = field(init=False)
    sequences: list[Sequence] = field(init=False)
    # Choices that come into being when the leader has computed the prompt: they fork from it.
    unforked: list[Sequence] = field(init=False)
    # Of each token of the prompt, NaN until it is known and for the first; None = nobody asked.
    prompt_scores: TokenScores | None = field(init=False)
    rules: RequestRules | None = None  # what is changed in its logits; None = nothing
    beam_search: BeamSearch | None = None  # its sequences are beams

    def __post_init__(self) -> None:
        prompt = self.prompt_token_ids = list(self.prompt_token_ids)  # the caller may go on with his
        hashes = BlockHashes(self.block_size, self.cache_salt, self.rope_length)
        self.cache_salt = None  # hashed; never to be logged
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        # Only the leader has the text before the choices fork: a thousand copies of a long prompt would wait with it.
        self.sequences = [Sequence(self, 0, prompt.copy(), hashes)]
        self.sequences += [Sequence(self, choice, [], hashes.copy()) for choice in range(1, self.params.num_choices)]
        self.unforked = self.sequences[1:]
        num_top = self.params.prompt_logprobs
        self.prompt_scores = None if num_top is None else TokenScores.empty(len(prompt), num_top)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def leader(self) -> Sequence:
        """The choice that computes the prompt for all."""
        return self.unfinished[0]

    @property
    def lanes(self) -> list[int]:
        return [sequence.lane for sequence in self.sequences if sequence.lane is not None]
