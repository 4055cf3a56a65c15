"""`Meter`: how many blocks sequences really hold while an engine runs, read from the plans that are carried out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.executor.base import Executor
from vtoken.memory.block_table import EMPTY
from vtoken.memory.copy import CopyCounts
from vtoken.schedule.plan import StepPlan, StepResult


@dataclass(frozen=True)
class Held:
    """Blocks that a sequence held, those included that it was given and has not filled yet.

    Means are over tokens: what was held when a token was computed. None where there was no such token.
    """

    reading: float | None  # while prompts were computed
    answering: float | None  # while answers grew
    peak: int


class Meter:
    """An executor that carries out the plans of another one, and takes notes."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        # For (reading, answering): blocks summed over tokens, and the number of tokens.
        self._blocks, self._tokens, self._peak = np.zeros(2), np.zeros(2), 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)  # what fails is computed again, and counts then
        if plan.num_slices:
            held = (plan.block_tables != EMPTY).sum(axis=1)
            tokens = np.diff(plan.starts)
            answers = np.zeros(plan.num_slices, np.bool_)
            answers[plan.sampling.slices[plan.sampling.indices > 0]] = True  # the first token is drawn from the prompt
            for i, some in enumerate((~answers, answers)):
                self._blocks[i] += float((held[some] * tokens[some]).sum())
                self._tokens[i] += float(tokens[some].sum())
            self._peak = max(self._peak, int(held.max()))
        return result

    def copy_counts(self) -> CopyCounts:
        return self._inner.copy_counts()

    def close(self) -> None:
        self._inner.close()

    def read(self) -> Held:
        """Since the last `reset`."""
        reading, answering = (
            float(blocks / tokens) if tokens else None
            for blocks, tokens in zip(self._blocks, self._tokens, strict=True)
        )
        return Held(reading, answering, self._peak)
