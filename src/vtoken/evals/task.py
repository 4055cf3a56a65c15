"""`Task`: texts with known answers, and what came of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from vtoken.engine.outputs import RequestOutput
from vtoken.engine.text import Tokenizer


@dataclass(frozen=True)
class Probe:
    """One request: a text to be scored, or one to be answered."""

    token_ids: list[int]
    # So many tokens are read before the memory is brought down to its budget; what follows is asked of what is left.
    # None: all of them.
    prompt_end: int | None = None
    max_tokens: int = 1
    is_scored: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cell:
    """What came of the needles of one depth and length."""

    depth: float  # 0 = at the beginning of the haystack, 1 = at its end
    length: int  # tokens of the haystack
    found: int
    tried: int
    logprob: float  # mean of the answers' tokens, in nats


@dataclass(frozen=True)
class Grade:
    """Scores by name, those of `Task.columns`."""

    scores: Mapping[str, float]
    cells: tuple[Cell, ...] = field(default=())


@dataclass(frozen=True)
class Column:
    """One score of a task, as a table shows it."""

    name: str
    title: str
    form: str  # of `format`
    better: str  # "lower" or "higher"


class Task(ABC):
    """What is measured. The same probes are run under every setting."""

    name: ClassVar[str]
    columns: ClassVar[tuple[Column, ...]]
    """The scores, the one that matters first."""
    counts_answers: ClassVar[bool]
    """Whether memory is that of the tokens of answers (True), or of the tokens that are read."""

    @property
    @abstractmethod
    def about(self) -> str:
        """One line that says what was run, for whoever reads the table."""

    @property
    def longest(self) -> int:
        """Tokens of its longest text, where that is known before `prepare`; else 0."""
        return 0

    @abstractmethod
    def prepare(self, tokenizer: Tokenizer) -> Sequence[Probe]:
        """The probes. Raises ConfigError where there is nothing to run."""

    @abstractmethod
    def grade(self, outputs: Sequence[RequestOutput]) -> Grade:
        """What the outputs of the probes, in their order, are worth."""


def scores_of(output: RequestOutput, begin: int) -> list[float]:
    """Log-probabilities of the tokens of a scored probe from position `begin` on, which is not 0."""
    assert output.prompt_logprobs is not None, "only scored probes are graded by scores"
    scored = zip(output.prompt_token_ids[begin:], output.prompt_logprobs[begin:], strict=True)
    return [found[token].logprob for token, found in scored if found is not None]
