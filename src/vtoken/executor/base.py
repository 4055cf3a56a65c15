"""`Executor`: takes plans, returns facts, knows nothing of requests."""

from __future__ import annotations

from typing import Protocol

from vtoken.memory.copy import CopyCounts
from vtoken.schedule.plan import StepPlan, StepResult


class Executor(Protocol):
    """Carries out plans in the order in which they come."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's ordered copies, then its forward pass and draws.

        A draw that fails is named in `StepResult.errors`. What raises has failed the whole step.
        """
        ...

    def copy_counts(self) -> CopyCounts:
        """The copies that were done since the start."""
        ...

    def close(self) -> None:
        """Give memory and threads back. May be called twice."""
        ...
