"""What metrics cost: to record a step, to take a snapshot, to render a page; with all sequences decoding.

    python benchmarks/bench_metrics.py [--sequences 256 --live 256 --steps 200] [--model smollm2-135m]

The executor is simulated. With `--model` steps of that model with as many sequences are timed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from vtoken import LLM, AsyncLLM, SamplingParams
from vtoken.base.clock import MonotonicClock
from vtoken.engine.engine import Engine, EngineFacts
from vtoken.executor.sim import SimExecutor
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.scheduler import Scheduler
from vtoken.server.metrics import Metrics
from vtoken.server.step_recorder import StepRecorder

BLOCK_SIZE = 16


def make_engine(num_sequences: int, length: int) -> Engine:
    num_blocks = num_sequences * -(-length // BLOCK_SIZE)
    memory, clock = KVCacheManager(num_blocks, BLOCK_SIZE), MonotonicClock()
    scheduler = Scheduler(SchedulerConfig(num_sequences, 8192, length), memory, clock)
    return Engine(scheduler, SimExecutor(num_blocks, BLOCK_SIZE), EngineFacts(1000, None, 1, 1), clock=clock)


def fill(engine: Engine, num_sequences: int, live: int, steps: int) -> None:
    """All decode when this returns."""
    params = SamplingParams(max_tokens=steps + 60, temperature=0, ignore_eos=True)
    for i in range(num_sequences):
        engine.add_request(str(i), [(i * 31 + j) % 997 for j in range(live)], params, output_kind="final")
    while engine.stats().num_waiting or len(engine.last_step.drawn) < num_sequences:
        engine.step()


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def tell(what: str, times: list[float]) -> None:
    print(f"| {what} | {statistics.median(times):.3f} | {sorted(times)[int(0.9 * len(times))]:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model")
    args = parser.parse_args()
    engine = make_engine(args.sequences, args.live + args.steps + 64)
    fill(engine, args.sequences, args.live, args.steps)
    recorder = StepRecorder(engine.scheduler.config.max_model_len)
    recorder(engine, engine.step())
    print("| ms | median | p90 |\n|---|---|---|")
    record, snapshot = [], []
    for _ in range(args.steps):
        engine.step()
        record.append(milliseconds(lambda: recorder._enter(engine.last_step)))
        snapshot.append(milliseconds(lambda: recorder.take(engine)))
    assert all(len(sequences) for sequences in recorder._last.values())
    tell("record a step", record)
    tell(f"take a snapshot ({engine.scheduler.memory.pool.num_blocks:,} blocks)", snapshot)
    llm = AsyncLLM.from_engine(make_engine(4, 64))
    metrics = Metrics(llm)
    tell("render a page", [milliseconds(metrics.render) for _ in range(args.steps)])
    llm.close()
    if args.model:
        length = args.live + 96
        blocks = args.sequences * -(-length // BLOCK_SIZE)
        with LLM(args.model, num_blocks=blocks, max_model_len=length, max_num_seqs=args.sequences) as real:
            fill(real.engine, args.sequences, args.live, 20)
            tell(f"a step of {args.model}", [milliseconds(real.engine.step) for _ in range(10)])


if __name__ == "__main__":
    main()
