"""Engines without a model for the tests of metrics, what they are asked, and metrics read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.driving import tokens
from vtoken import SamplingParams
from vtoken.base.clock import Clock, ManualClock, MonotonicClock
from vtoken.engine.engine import Engine, EngineFacts
from vtoken.executor.sim import SimExecutor
from vtoken.memory.copy import CopyCounts
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.policies.registry import resolve_policy
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.retention import KEEPS_ALL, RetentionSettings
from vtoken.schedule.scheduler import Scheduler

SIZE = 4
EOS = 7
BLOCK_BYTES = 100

Sample = tuple[str, frozenset[tuple[str, str]]]  # name, labels


@dataclass
class Watched:
    """A `SimExecutor` that can be made to hang, to fail, and to take time; it counts for itself what it was told."""

    inner: SimExecutor
    clock: Clock
    seconds: Callable[[int], float] = lambda step: 0.0  # that a step takes, on a clock that is turned by hand
    before: Callable[[StepPlan], None] = lambda plan: None  # may block, or raise
    tokens_of_steps: list[int] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        self.before(plan)
        result = self.inner.execute(plan)
        if isinstance(self.clock, ManualClock):
            self.clock.advance(self.seconds(plan.step))
        self.tokens_of_steps.append(plan.num_tokens)
        return result

    def copy_counts(self) -> CopyCounts:
        return self.inner.copy_counts()

    def close(self) -> None:
        self.inner.close()


def make_engine(
    num_blocks: int = 48, *, evicts: bool = False, num_host_blocks: int = 0, clock: Clock | None = None, **config: Any
) -> Engine:
    """Short of blocks under a few dozen requests; with `evicts` the policy may bring each down to 12 tokens."""
    clock = clock or MonotonicClock()
    retention = RetentionSettings(resolve_policy("h2o"), 12) if evicts else KEEPS_ALL
    memory = KVCacheManager(num_blocks, SIZE, num_host_blocks=num_host_blocks)
    settings = {"preemption": "swap" if num_host_blocks else "recompute", "max_num_seqs": 8} | config
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=32,
            max_model_len=num_blocks * SIZE,
            eos_token_ids=frozenset({EOS}),
            retention=retention,
            **settings,
        ),
        memory,
        clock,
    )
    executor = Watched(SimExecutor(num_blocks, SIZE, num_host_blocks), clock)
    return Engine(scheduler, executor, EngineFacts(1000, None, BLOCK_BYTES, 5000), clock=clock, seed=0)


@dataclass(frozen=True)
class Ask:
    """A request of a load."""

    number: int
    prompt: list[int]
    params: SamplingParams


def load(count: int, seed: int = 0) -> list[Ask]:
    """Texts that begin alike, long and short, some with several choices."""
    asks = []
    for i in range(count):
        draw = tokens(4, seed, i, vocab_size=2**30)
        prompt = tokens(8, seed, draw[0] % 2) + tokens(draw[1] % 30, seed, i, 1)
        params = SamplingParams(
            max_tokens=1 + draw[2] % 40, n=2 if draw[3] % 5 == 0 else 1, temperature=1.0, ignore_eos=bool(i % 3)
        )
        asks.append(Ask(i, prompt, params))
    return asks


def read(text: bytes) -> dict[Sample, float]:
    """Every sample of a page, without the labels that all have."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(samples: dict[Sample, float], name: str, prefix: str = "vtoken:", **labels: str) -> float:
    return samples[prefix + name, frozenset(labels.items())]


def by(samples: dict[Sample, float], name: str, label: str) -> dict[str, float]:
    """A metric's values by those of its label."""
    return {dict(labels)[label]: number for (found, labels), number in samples.items() if found == "vtoken:" + name}
