"""What an engine's own counters say about its settings."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.engine.stats import EngineStats

ENOUGH_REQUESTS = 10  # that have ended: with fewer nothing is said
MANY_PREEMPTIONS = 0.1  # a request
LOW_USE = 0.5  # share of the pool


@dataclass(frozen=True)
class Advice:
    """Something that was seen, and settings that would change it, the likeliest first."""

    finding: str
    remedies: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.finding}: {'; or '.join(self.remedies)}"


def advise(stats: EngineStats) -> list[Advice]:
    """What should be set otherwise, after a load that is typical of the engine's use. Nothing after a short one."""
    counters, usage = stats.scheduler, stats.usage
    num_ended = sum(counters.finished.values())
    if num_ended < ENOUGH_REQUESTS:
        return []
    found = []
    if counters.preemptions > MANY_PREEMPTIONS * num_ended:
        found.append(
            Advice(
                f"{counters.preemptions:,} preemptions for {num_ended:,} requests: the KV pool of "
                f"{usage.num_blocks:,} blocks is short",
                (
                    f"lower max_num_seqs (now {stats.max_num_seqs})",
                    "hold KV in fewer bits with kv_cache_dtype='int8' or 'fp8_e4m3'",
                    f"shorten texts with max_tokens or max_model_len (now {stats.max_model_len:,})",
                    "let tokens die with kv_policy and kv_budget",
                    "raise kv_memory",
                ),
            )
        )
    if counters.swap_fallbacks:
        found.append(
            Advice(
                f"{counters.swap_fallbacks:,} preempted requests were computed again because swap space was full",
                ("raise swap_space", "set preemption='recompute' and spare it"),
            )
        )
    share = counters.peak_held_blocks / usage.num_blocks
    if share < LOW_USE:
        found.append(
            Advice(
                f"never more than {share:.0%} of the KV pool was in use",
                (f"raise max_num_seqs (now {stats.max_num_seqs}) and send more at once", "lower kv_memory"),
            )
        )
    return found
