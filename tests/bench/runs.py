"""Small benchmark runs that more than one test looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vtoken.bench.arms import Run, run_arm
from vtoken.bench.devices import DEVICES
from vtoken.bench.jobs import Job
from vtoken.bench.shapes import SHAPES
from vtoken.bench.stages import Arm, Setting, SimulatedStage, Stage
from vtoken.policies.base import Policy
from vtoken.policies.registry import resolve_policy

# Ten requests that are there at once, in a pool for about three of them.
JOBS = tuple(Job(0.0, 40 + 7 * i, 30 + 5 * (i % 4)) for i in range(10))
NUM_BLOCKS = 32


def start(setting: Setting) -> Stage:
    return SimulatedStage(setting, SHAPES["llama-3.1-8b"], DEVICES["h100"])


def setting(arm: Arm, policy: str | Policy = "h2o", budget: float = 0.5, **changes: object) -> Setting:
    made = Setting(arm, resolve_policy(policy), budget, block_size=8, num_blocks=NUM_BLOCKS, max_model_len=256)
    return replace(made, **changes)


def run(arm: Arm, jobs: Sequence[Job] = JOBS, *, seed: int = 0, pictures: bool = False, **changes: object) -> Run:
    return run_arm(setting(arm, **changes), jobs, start, seed=seed, pictures=pictures)  # type: ignore[arg-type]
