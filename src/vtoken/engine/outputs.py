"""What a request gives back, shaped as vLLM's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token at a place, by its own logits: before penalties, biases and temperature."""

    logprob: float  # natural logarithm of the probability
    rank: int  # 1 = no other token was likelier
    decoded_token: str | None = None  # None without a tokenizer


TokenLogprobs = dict[int, Logprob]  # of a place: the token that stands there first, then the likeliest ones


@dataclass(frozen=True)
class CompletionOutput:
    """One choice of a request, as far as it has come."""

    index: int
    text: str  # "" without a tokenizer
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None while it runs
    stop_reason: int | str | None = None  # the one of `stop_token_ids` or `stop` that ended the choice
    error: str | None = None  # what went wrong, where finish_reason is "error"
    logprobs: list[TokenLogprobs] | None = None  # one a token, with `SamplingParams.logprobs`
    cumulative_logprob: float | None = None  # of all tokens, with `logprobs` or where the best were chosen
    # Tokens that were evicted: position -> length of the text when it happened. Such a token was not seen afterwards.
    died_at: dict[int, int] = field(default_factory=dict)
    num_kept: int = 0  # tokens of the text, prompt and answer, that were not evicted
    num_evicted: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened, in seconds of the engine's clock, and what they cost."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """A request and its choices; `outputs[j].index == j`.

    A delta (`output_kind="delta"`) has only choices with news, and of each only new text and new tokens with their
    scores: `join_deltas` makes one of several. `died_at`, `num_kept` and `num_evicted` come with the end of a choice
    then, `prompt_logprobs` with the first delta.
    """

    request_id: str
    prompt: str | None  # None when it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache, so never computed for this request
    # With `SamplingParams.prompt_logprobs`: of each token of the prompt after what came before it and was not evicted;
    # the first has none. None until the prompt is computed.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None

    @property
    def error(self) -> str | None:
        """The first error among the choices."""
        return next((output.error for output in self.outputs if output.error is not None), None)


def join_deltas(deltas: Sequence[RequestOutput]) -> RequestOutput:
    """One delta that says what these, which followed each other, say together. `deltas` has at least one."""
    if len(deltas) == 1:
        return deltas[0]
    pieces: dict[int, list[CompletionOutput]] = {}
    for delta in deltas:
        for choice in delta.outputs:
            pieces.setdefault(choice.index, []).append(choice)
    choices = [_join(said) for _, said in sorted(pieces.items())]
    scores = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
    return replace(deltas[-1], outputs=choices, prompt_logprobs=scores)


def _join(said: list[CompletionOutput]) -> CompletionOutput:
    return replace(
        said[-1],
        text="".join(each.text for each in said),
        token_ids=[token for each in said for token in each.token_ids],
        logprobs=None if said[-1].logprobs is None else [place for each in said for place in each.logprobs or ()],
    )
