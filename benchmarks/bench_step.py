"""Host time of one scheduling step: `schedule()`, the eviction of victims at a stride, and `apply()` with statistics.

The executor is left out: it hands back random tokens and random statistics for every row. All sequences have the same
budget of live tokens and hold it in steady decode: every `STRIDE` tokens each loses `STRIDE` of them, chosen by its own
statistics outside a recent window, and new tokens take the cells of the dead.

    python benchmarks/bench_step.py [--sequences 1024 --live 2048 --steps 64]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from vtoken.base.clock import MonotonicClock
from vtoken.base.sampling_params import SamplingParams
from vtoken.memory import bits
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.scheduler import Scheduler

BLOCK_SIZE = 16
STRIDE = 16
RECENT = 32


class Bench:
    def __init__(self, num_sequences: int, live: int, *, eviction: bool, dtype: str | None) -> None:
        self.live, self.eviction, self.dtype = live, eviction, dtype
        blocks_each = -(-(live + 2 * STRIDE + 4096 * (not eviction)) // BLOCK_SIZE) + 1
        self.memory = KVCacheManager(
            num_sequences * blocks_each,
            BLOCK_SIZE,
            enable_prefix_caching=not eviction,
            columns={"attention": dtype} if dtype else None,
        )
        config = SchedulerConfig(num_sequences, num_sequences * (live + STRIDE), live + 8192)
        self.scheduler = Scheduler(config, self.memory, MonotonicClock())
        self.random = np.random.default_rng(0)
        for i in range(num_sequences):
            prompt = self.random.integers(0, 1000, live - i % STRIDE).tolist()
            self.scheduler.add(str(i), prompt, SamplingParams(max_tokens=None), seed=i)
        self.mass = np.zeros((num_sequences, 0))

    def execute(self, plan: StepPlan) -> StepResult:
        num_rows = int(self.memory.tokens.num_rows.max())
        if self.dtype and self.mass.shape != (plan.num_slices, num_rows):
            self.mass = self.random.random((plan.num_slices, num_rows)).astype(self.dtype)
        found = {"attention": self.mass} if self.dtype else {}
        tokens = self.random.integers(0, 1000, len(plan.sampling)).astype(np.int32)
        return StepResult(plan.step, tokens, statistics=found)

    def evict(self) -> None:
        """What a policy and its trigger will do: the lowest scores of the lanes that are due, many lanes at once."""
        tokens, blocks = self.memory.tokens, self.memory.blocks
        lanes = np.flatnonzero((tokens.num_live >= self.live + STRIDE) & (tokens.lengths % STRIDE == 0))
        if not len(lanes):
            return
        num_entries = int(blocks.num_entries[lanes].max())
        live = bits.unpack(blocks.masks[lanes, :num_entries], BLOCK_SIZE)
        scores = np.where(live, tokens.columns["attention"][lanes, : live.shape[1]], np.inf)
        scores[tokens.positions[lanes, : live.shape[1]] >= (tokens.lengths[lanes] - RECENT)[:, None]] = np.inf
        victims = np.argpartition(scores, STRIDE, axis=1)[:, :STRIDE]
        self.memory.evict(np.repeat(lanes, STRIDE), victims.reshape(-1).astype(np.int64))

    def step(self) -> tuple[float, float, float]:
        """Seconds of (schedule, apply, evict)."""
        t0 = time.perf_counter()
        plan = self.scheduler.schedule()
        t1 = time.perf_counter()
        assert plan is not None
        result = self.execute(plan)
        t2 = time.perf_counter()
        self.scheduler.apply(result)
        t3 = time.perf_counter()
        if self.eviction:
            self.evict()
        t4 = time.perf_counter()
        return t1 - t0, t3 - t2, t4 - t3


def measure(num_sequences: int, live: int, steps: int, *, eviction: bool, dtype: str | None) -> None:
    bench = Bench(num_sequences, live, eviction=eviction, dtype=dtype)
    for _ in range(2 * STRIDE + 2):  # the prompts, then until every lane has lost tokens and reuses their cells
        bench.step()
    taken = bench.memory.counters.blocks_taken
    times = [bench.step() for _ in range(steps)]
    parts = [statistics.median(part) * 1e3 for part in zip(*times, strict=True)]
    totals = sorted(sum(t) * 1e3 for t in times)
    spread = f"{totals[len(totals) // 10]:.2f}-{totals[9 * len(totals) // 10]:.2f}"
    cells = [dtype or "none", "at stride" if eviction else "none", f"{num_sequences:,} x {live:,}"]
    cells += [f"{ms:.2f}" for ms in (*parts, statistics.median(totals))]
    cells += [spread, f"{bench.memory.counters.blocks_taken - taken:,}"]
    print(f"| {' | '.join(cells)} |", flush=True)
    if eviction:
        assert bench.memory.counters.tokens_relocated == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--live", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    n, live, steps = args.sequences, args.live, args.steps
    print("| statistics | evictions | sequences x live | schedule | apply | evict | step ms | p10-p90 | blocks taken |")
    print("|---|---|---|---|---|---|---|---|---|")
    measure(n, live, steps, eviction=False, dtype=None)
    for dtype in ("float32", "float64"):
        measure(n, live, steps, eviction=False, dtype=dtype)
        measure(n, live, steps, eviction=True, dtype=dtype)
    for count in (1000, 2500, 5000, 10000):
        measure(count, 256, steps, eviction=True, dtype="float32")


if __name__ == "__main__":
    main()
