"""Perplexity of a long text read under the budget: how well the memory that is left predicts what comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from vtoken.base.errors import ConfigError
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.text import Tokenizer
from vtoken.evals.task import Column, Grade, Probe, Task, scores_of
from vtoken.evals.texts import Text


@dataclass
class Perplexity(Task):
    """Windows of a text, one behind the other, each read from an empty memory. The first half of a window fills the
    memory, the second half counts."""

    name: ClassVar[str] = "perplexity"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("perplexity", "perplexity", ".3f", "lower"),
        Column("logprob", "nats/token", ".4f", "higher"),
    )
    counts_answers: ClassVar[bool] = False

    text: Text
    length: int  # tokens of a window
    limit: int  # windows at most
    _num_windows: int = field(init=False, default=0)

    @property
    def about(self) -> str:
        return (
            f"{self._num_windows} windows of {self.length:,} tokens of {self.text.name}; the second half of each counts"
        )

    @property
    def begin(self) -> int:
        """The first position that counts."""
        return self.length // 2

    def prepare(self, tokenizer: Tokenizer) -> Sequence[Probe]:
        token_ids = tokenizer.encode(self.text.content)
        windows = [
            token_ids[begin : begin + self.length]
            for begin in range(0, len(token_ids) - self.length + 1, self.length)[: self.limit]
        ]
        if not windows:
            raise ConfigError(
                f"length: {self.text.name} has {len(token_ids):,} tokens, fewer than a window of {self.length:,}; give "
                "a longer text, or a shorter length"
            )
        self._num_windows = len(windows)
        return [Probe(window, is_scored=True) for window in windows]

    def grade(self, outputs: Sequence[RequestOutput]) -> Grade:
        scores = [score for output in outputs for score in scores_of(output, self.begin)]
        mean = math.fsum(scores) / len(scores)
        return Grade({"perplexity": math.exp(-mean), "logprob": mean})
