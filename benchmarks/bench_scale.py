"""How host time and the memory of the books grow: with sequences, with the size of the pool, with the batch.

Nothing is computed: a null executor hands back random tokens at once. All sequences decode, their lengths spread over a
block, so that in every step as many of them need a new one. Times are medians over `--steps` steps, with the 10th and
the 90th percentile. Where others use the machine, `--clock cpu` counts the seconds that this thread ran.

    python benchmarks/bench_scale.py [--steps 48] [--clock wall] [--json scale.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.base.clock import MonotonicClock
from vtoken.base.sampling_params import SamplingParams
from vtoken.engine.engine import Engine, EngineFacts, OutputKind
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 1000
CHUNK = 2**21  # tokens a step while prompts are let in

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}


class NullExecutor:
    """Random tokens for whatever was planned."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, self._random.integers(0, VOCAB_SIZE, len(plan.sampling)).astype(np.int32))

    def close(self) -> None:
        """Nothing to give back."""


def prompt(index: int, length: int) -> list[int]:
    """Every prompt differs from the first block on."""
    return [index // VOCAB_SIZE, index % VOCAB_SIZE, *(i % 97 for i in range(length - 2))]


def scheduler(num_sequences: int, num_blocks: int, length: int, *, prefix_caching: bool = True) -> Scheduler:
    """A scheduler whose sequences have been let in and decode."""
    memory = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=prefix_caching)
    config = SchedulerConfig(num_sequences, max(CHUNK, num_sequences), length + 4096)
    made = Scheduler(config, memory, MonotonicClock())
    for i in range(num_sequences):
        made.add(str(i), prompt(i, length - i % BLOCK_SIZE), SamplingParams(max_tokens=2048), seed=i)
    return made


def run_prompts(made: Scheduler, executor: NullExecutor) -> None:
    """Until every sequence is past its prompt."""
    while made.num_waiting or any(len(r.leader.token_ids) == r.num_prompt_tokens for r in made.running):
        step(made, executor, time.perf_counter)


def step(made: Scheduler, executor: NullExecutor, clock: Clock) -> tuple[float, float]:
    """Seconds of (schedule, apply)."""
    t0 = clock()
    plan = made.schedule()
    t1 = clock()
    assert plan is not None
    result = executor.execute(plan)
    t2 = clock()
    made.apply(result)
    return t1 - t0, clock() - t2


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: median, 10th and 90th percentile."""
    ordered = sorted(1e3 * s for s in seconds)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
    }


def measure_step(
    num_sequences: int, num_blocks: int, length: int, steps: int, clock: Clock, *, prefix_caching: bool = True
) -> Any:
    """Schedule and apply of decode steps, and the one in which all sequences end."""
    made, executor = scheduler(num_sequences, num_blocks, length, prefix_caching=prefix_caching), NullExecutor()
    run_prompts(made, executor)
    for _ in range(2):
        step(made, executor, clock)
    gc.collect()
    times = [step(made, executor, clock) for _ in range(steps)]
    held = made.memory.num_held
    # Every answer is complete after one more token.
    for request in made.running:
        lane = request.leader.lane
        assert lane is not None
        made._state["limit"][lane] = len(request.leader.token_ids) + 1
    ending = sum(step(made, executor, clock))
    assert made.num_unfinished == 0
    return {
        "sequences": num_sequences,
        "blocks": num_blocks,
        "context": length,
        "held_blocks": held,
        "prefix_caching": prefix_caching,
        "schedule_ms": spread([a for a, _ in times]),
        "apply_ms": spread([b for _, b in times]),
        "step_ms": spread([a + b for a, b in times]),
        "ending_ms": 1e3 * ending,
    }


def measure_churn(num_sequences: int, length: int, steps: int, clock: Clock) -> Any:
    """Steps in which answers of 128 tokens end, one sequence in 128 a step, and as many requests come in."""
    answer = 128
    made, executor = scheduler(num_sequences, num_sequences * (length + answer) // 8, length), NullExecutor()
    run_prompts(made, executor)
    lanes = np.array([request.leader.lane for request in made.running])
    # From here on the answers end one after the other, as if the requests had come so.
    left = np.random.default_rng(1).permutation(np.arange(num_sequences) % answer) + 2
    made._state["limit"][lanes] = made._state["total"][lanes] + left
    num_added, num_ended, times = num_sequences, 0, []
    for _ in range(steps):
        times.append(step(made, executor, clock))
        ended = made.take_finished()
        num_ended += len(ended)
        for _ in ended:
            made.add(str(num_added), prompt(num_added, length), SamplingParams(max_tokens=answer), seed=num_added)
            num_added += 1
    return {
        "sequences": num_sequences,
        "context": length,
        "ended_a_step": num_ended / steps,
        "schedule_ms": spread([a for a, _ in times]),
        "apply_ms": spread([b for _, b in times]),
        "step_ms": spread([a + b for a, b in times]),
    }


def print_churn(rows: Sequence[Any]) -> None:
    print("\nTime by number of sequences while requests come and go\n")
    print("| sequences | prompt | end and come in a step | schedule | apply | step ms | p10-p90 | us each |")
    print("|---" * 8 + "|")
    for row in rows:
        ms = row["step_ms"]
        cells = [f"{row['sequences']:,}", f"{row['context']:,}", f"{row['ended_a_step']:.1f}"]
        cells += [f"{row['schedule_ms']['median']:.2f}", f"{row['apply_ms']['median']:.2f}", f"{ms['median']:.2f}"]
        cells += [f"{ms['p10']:.2f}-{ms['p90']:.2f}", f"{1e3 * ms['median'] / row['sequences']:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def print_steps(title: str, rows: Sequence[Any]) -> None:
    print(f"\n{title}\n")
    print(
        "| sequences | blocks | held | tokens each | prefix cache | schedule | apply | step ms | p10-p90 | us each",
        end="",
    )
    print(" | all end, ms |")
    print("|---" * 11 + "|")
    for row in rows:
        ms = row["step_ms"]
        cells = [f"{row[name]:,}" for name in ("sequences", "blocks", "held_blocks", "context")]
        cells += ["on" if row["prefix_caching"] else "off"]
        cells += [f"{row['schedule_ms']['median']:.2f}", f"{row['apply_ms']['median']:.2f}", f"{ms['median']:.2f}"]
        cells += [f"{ms['p10']:.2f}-{ms['p90']:.2f}", f"{1e3 * ms['median'] / row['sequences']:.2f}"]
        cells += [f"{row['ending_ms']:,.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def timed(times: list[float], function: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """`function`, which also appends its seconds to `times`."""

    def timing(*args: Any, **kwargs: Any) -> Any:
        started = clock()
        try:
            return function(*args, **kwargs)
        finally:
            times.append(clock() - started)

    return timing


def measure_host(batch: int, length: int, steps: int, output_kind: OutputKind, clock: Clock) -> Any:
    """The whole of `Engine.step` but for the executor, in decode."""
    memory = KVCacheManager(batch * (-(-(length + 2 * steps) // BLOCK_SIZE) + 2), BLOCK_SIZE)
    config = SchedulerConfig(batch, max(CHUNK, batch), length + 2 * steps + BLOCK_SIZE)
    executor = NullExecutor()
    engine = Engine(
        Scheduler(config, memory, MonotonicClock()),
        executor,
        EngineFacts(VOCAB_SIZE, None, 1, 1),
        tokenizer=None,
        seed=0,
    )
    for i in range(batch):
        # No tokenizer here: turning ids into text is the tokenizer's time, not the books'.
        engine.add_request(
            str(i), prompt(i, length - i % BLOCK_SIZE), SamplingParams(max_tokens=None), output_kind=output_kind
        )
    run_prompts(engine.scheduler, executor)
    parts: dict[str, list[float]] = {name: [] for name in ("schedule", "execute", "apply", "report", "step")}
    engine.scheduler.schedule = timed(parts["schedule"], engine.scheduler.schedule, clock)  # type: ignore[method-assign]
    engine.scheduler.apply = timed(parts["apply"], engine.scheduler.apply, clock)  # type: ignore[method-assign]
    executor.execute = timed(parts["execute"], executor.execute, clock)  # type: ignore[method-assign]
    engine._report = timed(parts["report"], engine._report, clock)  # type: ignore[method-assign]
    whole = timed(parts["step"], engine.step, clock)
    for _ in range(steps):
        whole()
    host = [a - b for a, b in zip(parts["step"], parts["execute"], strict=True)]
    found = {f"{name}_ms": spread(parts[name]) for name in ("schedule", "apply", "report")}
    return {"batch": batch, "context": length, "outputs": output_kind, **found, "host_ms": spread(host)}


def print_host(rows: Sequence[Any]) -> None:
    print("\nHost time of a decode step: `Engine.step` less the executor\n")
    print("| batch | tokens each | outputs | schedule | apply | report | host ms | p10-p90 | us a sequence |")
    print("|---" * 9 + "|")
    for row in rows:
        ms = row["host_ms"]
        cells = [f"{row['batch']:,}", f"{row['context']:,}", row["outputs"]]
        cells += [f"{row[f'{name}_ms']['median']:.3f}" for name in ("schedule", "apply", "report")]
        cells += [f"{ms['median']:.3f}", f"{ms['p10']:.3f}-{ms['p90']:.3f}", f"{1e3 * ms['median'] / row['batch']:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def pool_bytes(words: int) -> int:
    """Bytes a block of a pool by the layout: references, pins, published, closed cells, its place on the stack."""
    return 4 + 4 + 1 + 4 * words + 4


def entry_bytes(words: int, block_size: int, column_bytes: int = 0) -> int:
    """Bytes an entry of a lane by the layout: block id, mask, and position (and statistics) of each of its rows."""
    return 4 + 4 * words + block_size * (4 + column_bytes)


LANE_BYTES = 4 * 4 + 4 * 1  # entries, length, rows, live tokens; evicted, in order, open, on the host


def measure_memory(num_sequences: int, num_blocks: int, length: int) -> Any:
    """Bytes of the books, traced, beside what their layout makes them; and of what Python keeps a sequence."""
    words = -(-BLOCK_SIZE // 32)
    gc.collect()
    tracemalloc.start()
    try:
        memory = KVCacheManager(num_blocks, BLOCK_SIZE)
        gc.collect()
        books_empty, peak = tracemalloc.get_traced_memory()
        made = Scheduler(SchedulerConfig(num_sequences, CHUNK, length + 4096), memory, MonotonicClock())
        for i in range(num_sequences):
            made.add(str(i), prompt(i, length), SamplingParams(max_tokens=2048), seed=i)
        gc.collect()
        waiting, _ = tracemalloc.get_traced_memory()
        run_prompts(made, NullExecutor())
        gc.collect()
        running, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    lanes, entries = memory.blocks.ids.shape
    pool = memory.pool
    pool_arrays = (pool.refs, pool.pins, pool.published, pool.closed, pool._stack)
    blocks, tokens = memory.blocks, memory.tokens
    entry_arrays = (blocks.ids, blocks.masks, tokens.positions, *tokens.columns.values())
    lane_arrays = (blocks.num_entries, tokens.lengths, tokens.num_rows, tokens.num_live)
    flags = (tokens.evicted, tokens.in_order, memory.is_open, memory.on_host)
    tables = sum(array.nbytes for array in entry_arrays)
    state = made._state._fields
    return {
        "sequences": num_sequences,
        "blocks": num_blocks,
        "context": length,
        "pool_bytes_a_block": sum(array.nbytes for array in pool_arrays) / num_blocks,
        "pool_formula": pool_bytes(words),
        "pool_traced_a_block": books_empty / num_blocks,
        "pool_peak_a_block": peak / num_blocks,
        "lanes": lanes,
        "entries": entries,
        "table_bytes_an_entry": tables / (lanes * entries),
        "table_formula": entry_bytes(words, BLOCK_SIZE),
        "lane_bytes": sum(array.nbytes for array in (*lane_arrays, *flags)) / lanes,
        "lane_formula": LANE_BYTES,
        "lane_state_bytes": state.itemsize,
        "waiting_bytes_a_sequence": (waiting - books_empty) / num_sequences,
        "running_bytes_a_sequence": (running - waiting) / num_sequences,
        "tables_bytes_a_sequence": tables / num_sequences,
        # What is left of a running sequence is the prefix index: keys, tokens and entries of its full blocks.
        "prefix_bytes_a_block": (running - waiting - tables - lanes * (LANE_BYTES + state.itemsize))
        / (num_sequences * (length // BLOCK_SIZE)),
    }


def print_memory(row: Any) -> None:
    print(f"\nMemory: {row['sequences']:,} sequences of {row['context']:,} tokens, {row['blocks']:,} blocks\n")
    print("| what | bytes | by the layout |")
    print("|---|---|---|")
    for what, found, formula in (
        ("a block of the pool", f"{row['pool_bytes_a_block']:.1f}", f"4 + 4 + 1 + 4 words + 4 = {row['pool_formula']}"),
        ("the same, all that is traced", f"{row['pool_traced_a_block']:.1f}", ""),
        ("the same, at most while it is made", f"{row['pool_peak_a_block']:.1f}", ""),
        (
            "an entry (a block a sequence holds)",
            f"{row['table_bytes_an_entry']:.1f}",
            f"4 + 4 words + block_size x (4 + columns) = {row['table_formula']}",
        ),
        ("a lane", f"{row['lane_bytes']:.1f}", f"4 x 4 + 4 = {row['lane_formula']}"),
        ("a lane's scheduling state", f"{row['lane_state_bytes']}", ""),
        (
            "tables a sequence, with room to grow",
            f"{row['tables_bytes_a_sequence']:,.0f}",
            f"{row['lanes']:,} lanes x {row['entries']:,} entries x {row['table_formula']} / {row['sequences']:,}",
        ),
        (
            "Python objects of a waiting request",
            f"{row['waiting_bytes_a_sequence']:,.0f}",
            "8 a token, twice, and the rest",
        ),
        ("what a running one adds, tables included", f"{row['running_bytes_a_sequence']:,.0f}", ""),
        ("a published block in the prefix index", f"{row['prefix_bytes_a_block']:,.0f}", ""),
    ):
        print(f"| {what} | {found} | {formula} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48, help="decode steps a row; a whole number of blocks is fair")
    parser.add_argument("--scale", type=float, default=1.0, help="of sequences and blocks, for a quick look")
    parser.add_argument("--sections", default="", help="some of by_sequences,by_blocks,full,churn,host,books")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    clock = CLOCKS[args.clock]

    def scaled(*counts: int) -> list[int]:
        return [max(1, round(count * args.scale)) for count in counts]

    million, ten = scaled(1_000_000, 10_000)
    each = 256 // BLOCK_SIZE + 8
    # Room to grow for the steps that are measured, and for those in which the prompts come in.
    full_length = million // ten * BLOCK_SIZE - args.steps - 3 * BLOCK_SIZE

    def by_sequences() -> Any:
        rows = [measure_step(n, million, 256, args.steps, clock) for n in scaled(1_000, 3_000, 10_000)]
        print_steps("Time by number of sequences, the pool being the same", rows)
        return rows

    def by_blocks() -> Any:
        pools = [max(n, ten // 25 * each) for n in scaled(10_000, 100_000, 1_000_000)]
        rows = [measure_step(ten // 25, n, 256, args.steps, clock) for n in pools]
        print_steps("Time by size of the pool, the sequences being the same", rows)
        return rows

    def full() -> Any:
        rows = [measure_step(ten, million, full_length, args.steps, clock, prefix_caching=False)]
        print_steps("A pool in full use", rows)
        return rows

    def churn() -> Any:
        rows = [measure_churn(n, 64, args.steps, clock) for n in scaled(1_000, 3_000, 10_000)]
        print_churn(rows)
        return rows

    def host() -> Any:
        kinds: tuple[OutputKind, ...] = ("final", "cumulative")
        rows = [measure_host(batch, 512, args.steps, kind, clock) for kind in kinds for batch in (64, 256, 1024)]
        print_host(rows)
        return rows

    def books() -> Any:
        row = measure_memory(max(1, ten // 10), million // 10, 512)
        print_memory(row)
        return row

    sections = {section.__name__: section for section in (by_sequences, by_blocks, full, churn, host, books)}
    chosen = args.sections.split(",") if args.sections else list(sections)
    if unknown := set(chosen) - set(sections):
        parser.error(f"unknown sections {sorted(unknown)}; known: {', '.join(sections)}")
    record = {name: sections[name]() for name in chosen}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
