"""`Job`: one request of a benchmark, known by its lengths; `Workload`: a list of them and where they come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from vtoken.base.hashing import mix64


@dataclass(frozen=True)
class Job:
    """One request. Its answer has exactly `num_output_tokens` tokens, whatever the model would like to say."""

    arrival: float  # seconds after the start
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_token_ids: tuple[int, ...] | None = None  # None = made up from a seed

    @property
    def num_tokens(self) -> int:
        """Length of the text when it is complete."""
        return self.num_prompt_tokens + self.num_output_tokens

    def scaled(self, scale: float) -> Job:
        """The same with lengths multiplied, at least one token each."""
        prompt, output = (max(1, round(n * scale)) for n in (self.num_prompt_tokens, self.num_output_tokens))
        ids = None if self.prompt_token_ids is None else self.prompt_token_ids[:prompt]
        return replace(self, num_prompt_tokens=prompt, num_output_tokens=output, prompt_token_ids=ids)

    def token_ids(self, index: int, seed: int, vocab_size: int) -> list[int]:
        """The prompt of the `index`-th job: its own, or ids drawn by hash, so that no two prompts begin alike."""
        if self.prompt_token_ids is not None:
            return list(self.prompt_token_ids)
        drawn = mix64(seed, index, np.arange(self.num_prompt_tokens)) % np.uint64(vocab_size)
        return [int(token) for token in drawn.tolist()]


@dataclass(frozen=True)
class Workload:
    """Jobs in the order of their arrival."""

    name: str
    about: str  # where the lengths come from, and what was done to them: a sentence for the report
    jobs: tuple[Job, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(job.num_tokens for job in self.jobs)

    @property
    def is_at_once(self) -> bool:
        """Whether nobody comes later than the clock starts."""
        return all(job.arrival == 0 for job in self.jobs)

    @property
    def mean_prompt(self) -> float:
        return float(np.mean([job.num_prompt_tokens for job in self.jobs]))

    @property
    def mean_output(self) -> float:
        return float(np.mean([job.num_output_tokens for job in self.jobs]))


def shaped(jobs: Iterable[Job], *, scale: float = 1.0, at_once: bool = False) -> tuple[Job, ...]:
    """Jobs with lengths scaled, by arrival; `at_once`: all of them are there when the clock starts."""
    ordered = sorted(jobs, key=lambda job: job.arrival)
    if at_once:
        ordered = [replace(job, arrival=0.0) for job in ordered]
    return tuple(job.scaled(scale) if scale != 1 else job for job in ordered)
