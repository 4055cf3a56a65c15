"""Scores of tokens as a request gets them: vLLM's dictionaries, one a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vtoken.engine.outputs import Logprob, TokenLogprobs
from vtoken.schedule.plan import TokenScores
from vtoken.schedule.sequence import Request
from vtoken.schedule.sequence import Sequence as Choice


def name_scores(
    token_ids: Sequence[int], scores: TokenScores, text_of: Callable[[int], str | None]
) -> list[TokenLogprobs]:
    """One dictionary for each of `token_ids`: the token itself, then the likeliest ones, best first."""
    named = []
    rows = zip(
        token_ids,
        scores.logprobs.tolist(),
        scores.ranks.tolist(),
        scores.top_tokens.tolist(),
        scores.top_logprobs.tolist(),
        strict=True,
    )
    for token, logprob, rank, top_tokens, top_logprobs in rows:
        found = {token: Logprob(logprob, rank, text_of(token))}
        for place, (other, value) in enumerate(zip(top_tokens, top_logprobs, strict=True), 1):
            found.setdefault(other, Logprob(value, place, text_of(other)))
        named.append(found)
    return named


def name_prompt_scores(
    token_ids: Sequence[int], scores: TokenScores | None, text_of: Callable[[int], str | None]
) -> list[TokenLogprobs | None] | None:
    """The same of a prompt, whose first token has none; None until all of it is computed."""
    if scores is None or np.isnan(scores.logprobs[1:]).any():
        return None
    rest = scores.of(slice(1, None))
    return [None, *name_scores(token_ids[1:], rest, text_of)]


def best_choices(request: Request) -> list[Choice]:
    """The choices that are returned, in their order: where more were drawn than asked for, those with the highest mean
    log-probability of a token. A beam search has put its own in order."""
    choices = request.sequences
    if request.params.num_choices > request.params.n and request.beam_search is None:
        choices = sorted(choices, key=lambda choice: -choice.total_logprob / max(1, choice.num_output_tokens))
    return choices[: request.params.n]
