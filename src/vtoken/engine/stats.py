"""`EngineStats`: one moment of an engine, and what it did so far."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.memory.copy import CopyCounts
from vtoken.memory.decisions import Verdict
from vtoken.memory.stats import MemoryCounters, MemoryUsage
from vtoken.schedule.config import SchedulerCounters
from vtoken.schedule.residents import WaitReason
from vtoken.schedule.sequence import Request, Sequence


@dataclass(frozen=True)
class StepFacts:
    """What the last step of an engine did, for those who watch it."""

    time: float  # when it ended, by the engine's clock
    num_tokens: int  # that went through the model; 0 if it failed
    drawn: list[Sequence]  # each got a token; beams are none of them
    finished: list[Request]  # whatever ended them, also between the steps


@dataclass(frozen=True)
class EngineStats:
    """Gauges of this moment (`usage`, `num_*`) and totals since the start (the others, limits aside)."""

    usage: MemoryUsage
    num_host_blocks: int
    free_host_blocks: int
    bytes_per_block: int
    weight_bytes: int
    max_model_len: int
    num_running: int  # requests
    num_waiting: int  # requests that never ran
    num_preempted: int  # requests that wait to go on
    waiting_by_reason: dict[WaitReason, int]  # all of `num_waiting` and `num_preempted`
    max_num_seqs: int
    num_copies_pending: int  # copies beside the steps that have not ended
    copies: CopyCounts
    reclaim_decisions: dict[Verdict, int]
    memory: MemoryCounters
    scheduler: SchedulerCounters
    busy_seconds: float  # time spent in steps

    def __str__(self) -> str:
        usage, memory, scheduler = self.usage, self.memory, self.scheduler
        return (
            f"pool {usage.num_blocks} blocks of {usage.block_size} tokens: {usage.held_blocks} held, "
            f"{usage.cached_blocks} cached, {usage.free_blocks} free, {usage.pinned_blocks} pinned, at most "
            f"{scheduler.peak_held_blocks} held at once; requests {self.num_running} running, {self.num_waiting} "
            f"waiting, {self.num_preempted} preempted; {scheduler.tokens_computed} tokens computed, "
            f"{scheduler.tokens_generated} drawn, {memory.prefix_hit_tokens} found in the prefix cache, "
            f"{memory.blocks_copied_on_write} blocks copied on write, {scheduler.preemptions} preemptions; "
            f"{self.tokens_per_second:.1f} tokens a second"
        )

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
