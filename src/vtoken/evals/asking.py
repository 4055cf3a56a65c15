"""What needles and questions have in common: a context is read, the memory is brought down to its budget, and then
something is asked whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vtoken.engine.outputs import RequestOutput
from vtoken.engine.text import Tokenizer
from vtoken.evals.task import Probe, scores_of


@dataclass(frozen=True)
class Asked:
    """Token ids of one question."""

    context: list[int]
    question: list[int]
    answer: list[int]  # one that is right

    def probes(self, max_tokens: int, stop_token_ids: tuple[int, ...], *, is_known: bool) -> tuple[Probe, Probe]:
        """(to be answered, to be scored: the right answer forced). `is_known`: tokens die when the question has been
        read; else before it comes, so that no policy can know what will be asked."""
        prompt = self.context + self.question
        end = len(prompt) if is_known else len(self.context)
        return (
            Probe(prompt, end, max_tokens, stop_token_ids=stop_token_ids),
            Probe(prompt + self.answer, end, is_scored=True),
        )

    def logprob(self, output: RequestOutput) -> float:
        """Mean log-probability of the answer's tokens, in nats."""
        scores = scores_of(output, len(self.context) + len(self.question))
        return math.fsum(scores) / len(scores)


def ask(tokenizer: Tokenizer, context: str | list[int], question: str, answer: str) -> Asked:
    """The parts are cut into tokens apart, so that a place between them is one between tokens."""
    return Asked(
        tokenizer.encode(context) if isinstance(context, str) else context,
        tokenizer.encode(question, add_special_tokens=False),
        tokenizer.encode(answer, add_special_tokens=False),
    )


def ends_of_line(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens after which an answer of one line is over, as far as one token stands for that."""
    encoded = [tokenizer.encode(end, add_special_tokens=False) for end in ("\n", "\n\n")]
    return tuple({token_ids[0] for token_ids in encoded if len(token_ids) == 1})


def first_line(text: str) -> str:
    """The answer without what a model goes on to say."""
    stripped = text.strip()
    return stripped.splitlines()[0].strip() if stripped else ""


def pairs(outputs: Sequence[RequestOutput]) -> list[tuple[RequestOutput, RequestOutput]]:
    """(answered, scored) for each question, in the order of `Asked.probes`."""
    return list(zip(outputs[::2], outputs[1::2], strict=True))
