"""The tokens of one choice of a request: which live, when the others died, and what its policy thinks of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vtoken.engine.engine import Engine
from vtoken.engine.text import Tokenizer
from vtoken.schedule.sequence import Request

MAX_TOKENS: Final = 4000  # that are told at once: the last ones, unless others are asked for


@dataclass(frozen=True)
class TokenStates:
    """One choice between two steps. Positions are of the whole text; `token_ids` are those from `start` on."""

    number: int
    request_id: str
    choice: int
    num_choices: int
    state: str
    num_prompt_tokens: int
    length: int
    start: int
    token_ids: list[int]
    died_at: dict[int, int]  # position -> length of the text at which it died
    scores: dict[int, float]  # position -> what its policy thinks of it; the lowest die first
    protected: list[int]  # positions that may not die
    policy: str | None


def look_at_tokens(engine: Engine, request: Request, choice: int, start: int | None) -> TokenStates:
    """In the engine's thread. Changes nothing. Raises IndexError for a choice that there is not."""
    sequence = request.sequences[choice]
    length = len(sequence.token_ids)
    first = max(0, length - MAX_TOKENS) if start is None else min(start, length)
    end = first + MAX_TOKENS
    scores: dict[int, float] = {}
    protected: list[int] = []
    judgement = engine.scheduler.judge(sequence)
    if judgement is not None:
        is_near = (judgement.positions >= first) & (judgement.positions < end)
        is_told = is_near & (judgement.scores == judgement.scores)  # NaN is no score
        told = zip(judgement.positions[is_told].tolist(), judgement.scores[is_told].tolist(), strict=True)
        scores = dict(told)
        protected = judgement.positions[is_near & judgement.is_protected].tolist()
    died_at = engine.scheduler.died_at(sequence)
    return TokenStates(
        number=request.index,
        request_id=request.request_id,
        choice=choice,
        num_choices=len(request.sequences),
        state=request.status.value,
        num_prompt_tokens=request.num_prompt_tokens,
        length=length,
        start=first,
        token_ids=sequence.token_ids[first:end],
        died_at={position: died for position, died in died_at.items() if first <= position < end},
        scores=scores,
        protected=protected,
        policy=None if request.retention is None else request.retention.policy.name,
    )


def to_json(states: TokenStates, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """With texts, or where there is no tokenizer the ids. In any thread."""
    text_of: Callable[[int], str] = str if tokenizer is None else tokenizer.token_text
    tokens = range(states.start, states.start + len(states.token_ids))
    return {
        "number": states.number,
        "id": states.request_id,
        "choice": states.choice,
        "choices": states.num_choices,
        "state": states.state,
        "prompt": states.num_prompt_tokens,
        "length": states.length,
        "start": states.start,
        "policy": states.policy,
        "text": [text_of(token) for token in states.token_ids],
        "died": [states.died_at.get(position, 0) for position in tokens],
        "rank": _ranks(states),
        "protected": states.protected,
    }


def _ranks(states: TokenStates) -> list[float | None]:
    """Of each token, 0 (dies first) to 1 (is kept longest); None where there is no score. Each policy has its own
    scale, so the order of the scores is what can be shown."""
    ordered = sorted(set(states.scores.values()))
    last = max(1, len(ordered) - 1)
    place = {score: round(index / last, 3) for index, score in enumerate(ordered)}
    tokens = range(states.start, states.start + len(states.token_ids))
    return [place[states.scores[position]] if position in states.scores else None for position in tokens]
