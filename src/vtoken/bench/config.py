"""`BenchConfig`: what `ReclaimBench` measures, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vtoken.base.config import KVCopies
from vtoken.base.errors import ConfigError
from vtoken.base.host_memory import available_bytes
from vtoken.base.units import format_bytes
from vtoken.bench.arms import evicts
from vtoken.bench.jobs import Workload
from vtoken.bench.stages import Arm, Setting, Stage
from vtoken.policies.base import Policy

POOL_REQUESTS: Final = 5  # requests of mean length that the pool of --pool auto holds whole


@dataclass(frozen=True)
class Place:
    """Where the arms run: how to start an engine for a setting, and what to call it in the report."""

    start: Callable[[Setting], Stage]
    about: dict[str, str]
    # (blocks, block size) -> bytes of this host; what a real model takes it knows itself.
    pool_bytes: Callable[[int, int], int] = lambda num_blocks, block_size: 0


@dataclass(frozen=True)
class BenchConfig:
    """What is measured. `policies`: what the user calls them -> what they are."""

    place: Place
    workloads: Sequence[Workload]
    policies: dict[str, Policy]
    ratios: Sequence[float] = (0.3, 0.5, 0.7)
    block_sizes: Sequence[int] = (16, 32, 48)
    arms: Sequence[Arm] = ("native", "naive", "repack", "vtoken")
    copies: KVCopies = "ordered"
    num_blocks: int | None = None  # None: enough for `POOL_REQUESTS` whole requests of the workload
    seed: int = 0
    sweeps: bool = True
    is_coarse: bool = False  # sweeps with half as many points
    probes: bool = True
    refill: bool = True  # the workload's requests come again while few wait, see `run_arm`
    settings: dict[str, Any] = field(default_factory=dict)  # for the report

    def check(self) -> None:
        """Raise ConfigError for what could not run, before anything does."""
        if self.num_blocks is not None:
            size, available = max(self.block_sizes), available_bytes()
            needed = self.place.pool_bytes(self.num_blocks, size)
            if needed > available:
                raise ConfigError(
                    f"pool: the books and simulated cells of {self.num_blocks} blocks of {size} tokens take "
                    f"{format_bytes(needed)}, but this host has {format_bytes(available)} of memory available; ask for "
                    f"at most {self.num_blocks * available // needed} blocks"
                )
        for workload in self.workloads:
            for size in self.block_sizes:
                needed = -(-workload.longest // size)
                if self.num_blocks is not None and self.num_blocks < needed:
                    raise ConfigError(
                        f"pool: {self.num_blocks} blocks of {size} tokens are too few for {workload.name}: its longest "
                        f"text has {workload.longest} tokens and needs {needed}, since native keeps all of it; give a "
                        "larger pool, or a smaller --scale"
                    )
            for name, policy in self.policies.items():
                for ratio in self.ratios:
                    if not any(evicts(policy, 1 - ratio, job) for job in workload.jobs):
                        raise ConfigError(
                            f"policy: {name} protects more than {1 - ratio:.0%} of every prompt of {workload.name}: "
                            "there is nothing it could evict"
                        )


def pool_for(workload: Workload, block_size: int) -> int:
    """Blocks of a pool that is too small for the workload: for `POOL_REQUESTS` texts of mean length, or the longest."""
    mean = (workload.mean_prompt + workload.mean_output) / block_size
    return max(-(-workload.longest // block_size) + 1, int(POOL_REQUESTS * mean))
