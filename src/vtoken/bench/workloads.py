"""Workloads made up from stated distributions: the same jobs for the same seed, on every machine.

Where the figures come from, and how they compare with traces (fits of `ln` tokens; docs/bench.md has the table):

- **chat**: the mean lengths that the vLLM paper gives for ShareGPT (arXiv:2309.06180, figure 11: 161 tokens of
  prompt, 338 of answer). Log-normal; the spreads lie between those of two traces: ShareGPT prompts as replayed by
  AIBrix (sigma 0.67 and 1.22) and Azure's conversations of 2023 (0.99 and 0.86). Cut off as that paper's benchmark
  does: 1,024 tokens of prompt, 2,048 in all.
- **long**: the 16 English tasks of LongBench (arXiv:2308.14508), equally often. A task's prompts are log-normal about
  its mean length (words x 4/3) with a spread of 0.4, at most 31,500 tokens, its truncation for models of 32K; an
  answer takes all the tokens that LongBench allows the task.
- **reasoning**: answers as ServeGen (arXiv:2505.09999) describes those of DeepSeek-R1 in service: log-normal, mu
  6.75, sigma 0.96 (a median of 856 tokens), at most 4,096. Prompts have that trace's median, 243 tokens, but a spread
  of 0.8, not 1.82: its long ones are documents, which "long" stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vtoken.base.hashing import uniform
from vtoken.bench.jobs import Job, Workload, shaped

TOKENS_PER_WORD: Final = 4 / 3  # of English text, with the vocabularies of today's models

_NORMAL: Final = NormalDist()


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal, rounded and cut off. `median` in tokens, `sigma` of `ln` tokens."""

    median: float
    sigma: float
    least: int
    most: int

    @classmethod
    def of_mean(cls, mean: float, sigma: float, least: int, most: int) -> LogNormal:
        """The one with this mean before it is cut off."""
        return cls(exp(log(mean) - sigma**2 / 2), sigma, least, most)

    def lengths(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """[n] -> [n]: the lengths below which these shares (0 to 1) of all lengths lie."""
        scores = np.array([_NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12)) for share in shares.tolist()])
        lengths = np.rint(self.median * np.exp(self.sigma * scores))
        return np.clip(lengths, self.least, self.most).astype(np.int64)


CHAT_PROMPT: Final = LogNormal.of_mean(161, 0.9, least=4, most=1024)
CHAT_ANSWER: Final = LogNormal.of_mean(338, 1.0, least=4, most=2048)
CHAT_MOST: Final = 2048  # tokens of prompt and answer together

REASONING_PROMPT: Final = LogNormal(exp(5.495), 0.8, least=16, most=2048)
REASONING_ANSWER: Final = LogNormal(exp(6.752), 0.96, least=64, most=4096)

LONG_SIGMA: Final = 0.4
LONG_MOST: Final = 31_500
# LongBench's English tasks -> (mean words of a prompt, most tokens of an answer).
LONG_TASKS: Final = {
    "narrativeqa": (18409, 128),
    "qasper": (3619, 128),
    "multifieldqa_en": (4559, 64),
    "hotpotqa": (9151, 32),
    "2wikimqa": (4887, 32),
    "musique": (11214, 32),
    "gov_report": (8734, 512),
    "qmsum": (10614, 512),
    "multi_news": (2113, 512),
    "trec": (5177, 64),
    "triviaqa": (8209, 32),
    "samsum": (6258, 128),
    "passage_count": (11141, 32),
    "passage_retrieval_en": (9289, 32),
    "lcc": (1235, 64),
    "repobench-p": (4206, 64),
}

_PROMPTS, _ANSWERS, _TASKS = range(3)  # streams of random numbers, apart from each other


def _chat(num_jobs: int, seed: int) -> list[Job]:
    prompts = CHAT_PROMPT.lengths(uniform(seed, _PROMPTS, np.arange(num_jobs)))
    answers = CHAT_ANSWER.lengths(uniform(seed, _ANSWERS, np.arange(num_jobs)))
    answers = np.minimum(answers, CHAT_MOST - prompts)
    return [Job(0.0, prompt, answer) for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True)]


def _long(num_jobs: int, seed: int) -> list[Job]:
    tasks = (uniform(seed, _TASKS, np.arange(num_jobs)) * len(LONG_TASKS)).astype(np.int64)
    shares = uniform(seed, _PROMPTS, np.arange(num_jobs))
    jobs = []
    for task, share in zip(tasks.tolist(), shares, strict=True):
        words, answer = list(LONG_TASKS.values())[task]
        prompts = LogNormal.of_mean(words * TOKENS_PER_WORD, LONG_SIGMA, least=256, most=LONG_MOST)
        jobs.append(Job(0.0, int(prompts.lengths(np.array([share]))[0]), answer))
    return jobs


def _reasoning(num_jobs: int, seed: int) -> list[Job]:
    prompts = REASONING_PROMPT.lengths(uniform(seed, _PROMPTS, np.arange(num_jobs)))
    answers = REASONING_ANSWER.lengths(uniform(seed, _ANSWERS, np.arange(num_jobs)))
    return [Job(0.0, prompt, answer) for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True)]


@dataclass(frozen=True)
class Generator:
    """`make(num_jobs, seed)`: that many jobs, all there at once."""

    about: str
    make: Callable[[int, int], list[Job]]
    num_jobs: int  # unless somebody says how many
    quick: tuple[int, float]  # jobs and scale of a first look: texts of some hundred tokens


WORKLOADS: Final = {
    "chat": Generator("ShareGPT-like chat: log-normal, means 161 + 338 tokens", _chat, 48, (12, 0.3)),
    "long": Generator(
        "LongBench-like: 16 tasks, prompts of 1K to 31K tokens, answers of 32 to 512", _long, 48, (16, 0.5)
    ),
    "reasoning": Generator(
        "reasoning-like: prompts of 243 tokens and answers of 856 (medians)", _reasoning, 24, (12, 0.15)
    ),
}


def make_workload(name: str, *, seed: int, num_jobs: int | None = None, scale: float = 1.0) -> Workload:
    """A workload of this package by its name, a key of `WORKLOADS`; lengths are multiplied by `scale`."""
    generator = WORKLOADS[name]
    jobs = shaped(generator.make(num_jobs or generator.num_jobs, seed), scale=scale)
    about = generator.about + (f"; all lengths x {scale:g}" if scale != 1 else "")
    return Workload(name, about, jobs)
