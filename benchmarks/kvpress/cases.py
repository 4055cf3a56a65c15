"""Texts that both sides run, as token ids: a context that is cut down, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from vtoken.engine.text import Tokenizer
from vtoken.evals.needle import Needle
from vtoken.evals.perplexity import Perplexity
from vtoken.evals.texts import Text

CONTINUATION = 256  # tokens that are scored behind a context, for perplexity
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Case:
    """`given` is read behind the context, then `scored` is forced. The last token of `given` is the first one whose
    logits count, so `given` is not empty."""

    kind: str  # "perplexity" or "needle"
    context: list[int]
    given: list[int]
    scored: list[int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        return cls(**record)


def make_cases(
    tokenizer: Tokenizer, text: Text, *, context: int, windows: int, needles: int, continuation: int = CONTINUATION
) -> list[Case]:
    """`windows` runs of text, one behind the other, and `needles` for each of `DEPTHS`."""
    reading = Perplexity(text, context + continuation, windows)
    cases = [
        Case("perplexity", ids[:context], ids[context : context + 1], ids[context + 1 :])
        for ids in (probe.token_ids for probe in reading.prepare(tokenizer))
    ]
    task = Needle(text, (context,), DEPTHS, needles, seed=0, is_known=False)
    task.prepare(tokenizer)
    return cases + [Case("needle", asked.context, asked.question, asked.answer) for asked in task.asked]


@dataclass(frozen=True)
class Found:
    """What one side says of a case: the sum of the log-probabilities of `scored`, and whether each of these tokens was
    the likeliest."""

    logprob: float
    is_greedy: bool


def summary(cases: Sequence[Case], found: Sequence[Found]) -> dict[str, float]:
    """Nats a token of the perplexity cases, share of needles found, nats a token of their answers."""
    result = {}
    for kind in ("perplexity", "needle"):
        some = [(case, each) for case, each in zip(cases, found, strict=True) if case.kind == kind]
        num_tokens = sum(len(case.scored) for case, _ in some)
        result[kind] = sum(each.logprob for _, each in some) / num_tokens
        if kind == "needle":
            result["found"] = sum(each.is_greedy for _, each in some) / len(some)
    return result
