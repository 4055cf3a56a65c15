"""Extractive question answering: paragraphs are read, and asked about when the memory has been cut down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from vtoken.base.hashing import mix64
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.text import Tokenizer
from vtoken.evals.asking import Asked, ask, ends_of_line, first_line, pairs
from vtoken.evals.squad import Question, exact_match, f1
from vtoken.evals.task import Column, Grade, Probe, Task

MOST_TOKENS: Final = 24  # of an answer


@dataclass
class QuestionAnswering(Task):
    """Some questions of a file, drawn by a hash of the seed."""

    name: ClassVar[str] = "qa"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("f1", "F1", ".1%", "higher"),
        Column("exact_match", "exact match", ".1%", "higher"),
        Column("logprob", "nats/token", ".3f", "higher"),
    )
    counts_answers: ClassVar[bool] = True

    source: str  # what people are told the questions are from
    questions: Sequence[Question]
    limit: int
    seed: int
    is_known: bool  # whether the question has been read when tokens die
    _drawn: list[Question] = field(init=False, default_factory=list)
    asked: list[Asked] = field(init=False, default_factory=list)

    @property
    def about(self) -> str:
        what = f"{len(self._drawn)} of {len(self.questions):,} questions of {self.source}"
        return f"{what}; tokens die {'after' if self.is_known else 'before'} the question"

    def prepare(self, tokenizer: Tokenizer) -> Sequence[Probe]:
        order = np.argsort(mix64(self.seed, np.arange(len(self.questions))), kind="stable")
        self._drawn = [self.questions[i] for i in sorted(order[: self.limit].tolist())]
        self.asked = []
        stops = ends_of_line(tokenizer)
        probes: list[Probe] = []
        for each in self._drawn:
            question = f"\n\nQuestion: {each.question}\nAnswer:"
            asked = ask(tokenizer, each.context, question, f" {each.answers[0]}")
            self.asked.append(asked)
            probes += asked.probes(MOST_TOKENS, stops, is_known=self.is_known)
        return probes

    def grade(self, outputs: Sequence[RequestOutput]) -> Grade:
        scores: dict[str, list[float]] = {column.name: [] for column in self.columns}
        for question, asked, (answered, scored) in zip(self._drawn, self.asked, pairs(outputs), strict=True):
            answer = first_line(answered.outputs[0].text)
            scores["f1"].append(f1(answer, question.answers))
            scores["exact_match"].append(exact_match(answer, question.answers))
            scores["logprob"].append(asked.logprob(scored))
        return Grade({name: math.fsum(values) / len(values) for name, values in scores.items()})
