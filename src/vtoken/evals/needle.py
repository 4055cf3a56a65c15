"""Needle in a haystack: a fact hidden in a long text, asked for at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar, Final

import numpy as np

from vtoken.base.errors import ConfigError
from vtoken.base.hashing import uniform
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.text import Tokenizer
from vtoken.evals.asking import Asked, ask, pairs
from vtoken.evals.task import Cell, Column, Grade, Probe, Task
from vtoken.evals.texts import Text

CITIES: Final = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Lisbon", "Athens", "Dublin", "Oslo",
    "Moscow", "Cairo", "Tokyo", "Boston", "Chicago", "Toronto",
)  # fmt: skip
DIGITS: Final = 6
_LEAST_FILLER: Final = 32  # tokens


@dataclass
class Needle(Task):
    """For each depth and length some haystacks with a needle each. Haystacks of a length differ in where their text
    begins, needles in city and number."""

    name: ClassVar[str] = "needle"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("found", "found", ".0%", "higher"),
        Column("logprob", "nats/token", ".3f", "higher"),
    )
    counts_answers: ClassVar[bool] = True

    text: Text
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    limit: int  # needles of each depth and length
    seed: int
    is_known: bool  # whether the question has been read when tokens die
    asked: list[Asked] = field(init=False, default_factory=list)
    _numbers: list[str] = field(init=False, default_factory=list)

    @property
    def about(self) -> str:
        what = f"{len(self.asked)} numbers of {DIGITS} digits hidden in {self.text.name}, asked for at the end"
        return f"{what}; tokens die {'after' if self.is_known else 'before'} the question"

    @property
    def places(self) -> list[tuple[float, int, int]]:
        """(depth, length, number of the needle), in the order of the probes."""
        return [(*place, i) for place in product(self.depths, self.lengths) for i in range(self.limit)]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def prepare(self, tokenizer: Tokenizer) -> Sequence[Probe]:
        filler = tokenizer.encode(self.text.content, add_special_tokens=False)
        bos = [token for token in tokenizer.encode("a")[:1] if token == tokenizer.bos_token_id]  # where texts have one
        self.asked, self._numbers = [], []
        probes: list[Probe] = []
        for depth, length, i in self.places:
            # The same needles and texts at each depth: what differs is the depth alone.
            key = self.seed, length, i
            city = CITIES[int(uniform(*key, np.arange(1))[0] * len(CITIES))]
            number = "".join(str(int(10 * digit)) for digit in uniform(*key, np.arange(1, 1 + DIGITS)))
            fact = tokenizer.encode(f" The secret number of {city} is {number}.", add_special_tokens=False)
            num_filler = length - len(bos) - len(fact)
            if num_filler < _LEAST_FILLER:
                raise ConfigError(
                    f"length: a haystack of {length} tokens has no room for a needle of {len(fact)} and "
                    f"{_LEAST_FILLER} of text; at least {len(bos) + len(fact) + _LEAST_FILLER}"
                )
            start = int(uniform(*key, np.array([99]))[0] * len(filler))
            hay = [filler[(start + j) % len(filler)] for j in range(num_filler)]  # a short text comes round again
            cut = round(depth * num_filler)
            question = f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is"
            asked = ask(tokenizer, bos + hay[:cut] + fact + hay[cut:], question, f" {number}")
            self.asked.append(asked)
            self._numbers.append(number)
            probes += asked.probes(len(asked.answer) + 4, (), is_known=self.is_known)
        return probes

    def grade(self, outputs: Sequence[RequestOutput]) -> Grade:
        of_cell: dict[tuple[float, int], list[tuple[bool, float]]] = {}
        graded = zip(self.places, self.asked, self._numbers, pairs(outputs), strict=True)
        for (depth, length, _), asked, number, (answered, scored) in graded:
            is_found = number in answered.outputs[0].text
            of_cell.setdefault((depth, length), []).append((is_found, asked.logprob(scored)))
        cells = tuple(
            Cell(depth, length, sum(found for found, _ in seen), len(seen), _mean([logprob for _, logprob in seen]))
            for (depth, length), seen in of_cell.items()
        )
        found = sum(cell.found for cell in cells) / sum(cell.tried for cell in cells)
        return Grade({"found": found, "logprob": _mean([cell.logprob for cell in cells])}, cells)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
