"""Steps a second of the real scheduler and books on the simulated executor, under a load that preempts.

python benchmarks/bench_sim.py
"""

from __future__ import annotations

import statistics
import time

from vtoken.base.clock import MonotonicClock
from vtoken.base.sampling_params import SamplingParams
from vtoken.executor.sim import SimExecutor
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.scheduler import Scheduler

ROUNDS = 5


def run(num_requests: int, num_blocks: int, block_size: int = 16) -> tuple[float, float, int]:
    """(steps a second, tokens a second, preemptions) for prompts of 100 tokens and answers of 200."""
    memory = KVCacheManager(num_blocks, block_size)
    config = SchedulerConfig(num_requests, 2048, min(2048, num_blocks * block_size))
    scheduler = Scheduler(config, memory, MonotonicClock())
    executor = SimExecutor(num_blocks, block_size)
    for i in range(num_requests):
        prompt = [(i * 31 + j) % 997 for j in range(100)]
        scheduler.add(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=200), seed=i)
    started = time.perf_counter()
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(executor.execute(plan))
    seconds = time.perf_counter() - started
    counters = scheduler.counters
    return counters.steps / seconds, counters.tokens_computed / seconds, counters.preemptions


def main() -> None:
    print("| requests | blocks of 16 | steps a second | min-max | tokens a second | preemptions |")
    print("|---|---|---|---|---|---|")
    for num_requests, num_blocks in ((1, 64), (8, 200), (8, 100), (64, 1400), (64, 600)):
        rounds = [run(num_requests, num_blocks) for _ in range(ROUNDS)]
        steps = [steps for steps, _, _ in rounds]
        tokens = statistics.median(tokens for _, tokens, _ in rounds)
        print(
            f"| {num_requests} | {num_blocks} | {statistics.median(steps):,.0f} | {min(steps):,.0f}-{max(steps):,.0f} "
            f"| {tokens:,.0f} | {rounds[0][2]} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
