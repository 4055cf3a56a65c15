"""Where an arm runs; here on a simulated device. Scheduler and books are the real ones everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from vtoken.base.clock import ManualClock
from vtoken.base.config import KVCopies
from vtoken.bench.devices import Device
from vtoken.bench.heavy_hitters import AttentionModel, HeavyHitters
from vtoken.bench.roofline import Roofline, StepSeconds
from vtoken.bench.shapes import ModelShape
from vtoken.executor.sim import SimExecutor
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.policies.base import Policy
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.retention import RetentionSettings, Trigger
from vtoken.schedule.scheduler import Scheduler

# As `BlockPool` starts: three int64 to order the blocks by, and four int32 and a flag that stay.
_BOOKS_BYTES: Final = 3 * 8 + 4 * 4 + 1
# Hash, position and a weight a head of each cell; whether a step writes it; and its state in two pictures of the pool.
_CELL_BYTES: Final = 8 + 8 + 8 * AttentionModel().num_heads + 1 + 2

Arm = Literal["native", "naive", "repack", "vtoken"]


@dataclass(frozen=True)
class Setting:
    """What one run is set to. `budget` is in tokens, or as a float a share of the text."""

    arm: Arm
    policy: Policy | None
    budget: int | float | None
    block_size: int
    num_blocks: int
    max_model_len: int
    trigger: Trigger = "always"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    copies: KVCopies = "ordered"


class Stage(Protocol):
    """One engine, started for one run."""

    scheduler: Scheduler
    vocab_size: int
    bytes_per_token: int
    counts_host: bool  # the run's clock goes on while the host plans

    def now(self) -> float:
        """Seconds of the run's clock, the scheduler's too."""
        ...

    def wait_until(self, when: float) -> None:
        """Let time go by while there is nothing to do."""
        ...

    def execute(self, plan: StepPlan) -> tuple[StepResult, StepSeconds]:
        """Run a step; afterwards the clock stands where it was over."""
        ...

    def close(self) -> None: ...


def simulated_bytes(num_blocks: int, block_size: int) -> int:
    """Host memory that the books and the simulated cells of a pool take."""
    return num_blocks * (_BOOKS_BYTES + block_size * _CELL_BYTES)


class SimulatedStage:
    """A clock that is turned by what a roofline says of each step; tokens and attention are made up by hash."""

    vocab_size = 32_000
    counts_host = False

    def __init__(self, setting: Setting, shape: ModelShape, device: Device) -> None:
        self._clock = ManualClock()
        self._roofline = Roofline(shape, device)
        simulator = SimExecutor(setting.num_blocks, setting.block_size, vocab_size=self.vocab_size)
        self._executor = HeavyHitters(simulator)
        self.bytes_per_token = shape.kv.bytes_per_token
        memory = KVCacheManager(
            setting.num_blocks,
            setting.block_size,
            enable_prefix_caching=False,
            reuse_cells=setting.arm in ("native", "vtoken"),
        )
        config = SchedulerConfig(
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_model_len=setting.max_model_len,
            retention=RetentionSettings(setting.policy, setting.budget, setting.trigger),
            kv_mode=setting.arm,
            kv_copies=setting.copies,
        )
        self.scheduler = Scheduler(config, memory, self._clock)

    def now(self) -> float:
        return self._clock.now()

    def wait_until(self, when: float) -> None:
        self._clock.advance(max(0.0, when - self._clock.now()))

    def execute(self, plan: StepPlan) -> tuple[StepResult, StepSeconds]:
        result = self._executor.execute(plan)
        seconds = self._roofline.seconds(plan)
        self._clock.advance(seconds.total)
        return result, seconds

    def close(self) -> None:
        self._executor.close()
