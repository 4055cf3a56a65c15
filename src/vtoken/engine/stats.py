"""`EngineStats`: one moment of an engine, and what it did so far."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.memory.stats import MemoryCounters, MemoryUsage
from vtoken.schedule.config import SchedulerCounters


@dataclass(frozen=True)
class EngineStats:
    """Gauges of this moment (`usage`, `num_*`) and totals since the start (`memory`, `scheduler`, `busy_seconds`)."""

    usage: MemoryUsage
    num_host_blocks: int
    free_host_blocks: int
    bytes_per_block: int
    weight_bytes: int
    max_model_len: int
    num_running: int  # requests
    num_waiting: int  # requests that never ran
    num_preempted: int  # requests that wait to go on
    memory: MemoryCounters
    scheduler: SchedulerCounters
    busy_seconds: float  # time spent in steps

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool on the device."""
        return self.usage.num_blocks * self.bytes_per_block

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the admitted tokens that were in the prefix cache already."""
        queried = self.memory.prefix_query_tokens
        return self.memory.prefix_hit_tokens / queried if queried else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of work, all requests together."""
        return self.scheduler.tokens_generated / self.busy_seconds if self.busy_seconds else 0.0
