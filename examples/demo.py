"""A real model in a pool too small for the work: four ways to deal with evicted tokens, and what each gives back.

    python examples/demo.py

The first run downloads the model (about 100 MB), converts it and compiles the kernels; later runs start at once.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from vtoken import LLM, SamplingParams
from vtoken.base.units import format_bytes
from vtoken.bench import page
from vtoken.bench.config import BenchConfig, Place
from vtoken.bench.engine_stage import EngineStage
from vtoken.bench.jobs import Job, Workload
from vtoken.bench.progress import Lines
from vtoken.bench.reclaim import ReclaimBench
from vtoken.bench.report import Report, RunReport
from vtoken.models.catalog import get_model
from vtoken.policies.registry import resolve_policy

POLICY, ERASED = "h2o", 0.5
QUESTION = "Why is the sky blue?"
# Eight texts of about 200 tokens.
JOBS = tuple(Job(0.0, 96 + 4 * (7 * i % 5), 96 + 4 * (5 * i % 4)) for i in range(8))
BLOCK_SIZE, NUM_BLOCKS = 16, 56
PAGE = Path("reclaim-demo.html")


class CPUClock:
    """Seconds of a core that this process has had: what else runs on the machine does not count."""

    def now(self) -> float:
        return time.process_time()


def main() -> None:
    started = time.monotonic()
    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal
    console.print("This takes about a minute, and the first time one or two more, for the model and its kernels.")
    # A second thread gains little on steps this small, and loses much where something else runs.
    torch.set_num_threads(1)
    folder = str(get_model("smollm2-135m", progress=console.print))
    console.rule("One answer, and what it lost")
    bytes_per_block = answer_one(console, folder)
    whole = NUM_BLOCKS // max(-(-job.num_tokens // BLOCK_SIZE) for job in JOBS)
    console.rule(f"{len(JOBS)} requests, memory for {whole}: half of every text dies, by {POLICY}")
    console.print(
        f"Texts of {min(j.num_tokens for j in JOBS)} to {max(j.num_tokens for j in JOBS)} random tokens; a pool of "
        f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} holds {whole} of them whole. Four times the same work:"
    )
    found = compare_arms(folder)
    runs = {run.arm: run for run in found.runs}
    console.print(arms_table(runs))
    console.print(same_victims(found))
    console.print(
        "* of one core, by the CPU time of this process, so that what else runs here does not count", style="dim"
    )
    PAGE.write_text(page.to_html(found), encoding="utf-8")
    console.print(f"All figures, and pictures of the memory: {PAGE.absolute()}\n")
    console.print(about_speed(runs))
    console.print(in_one_sentence(runs, bytes_per_block), style="bold")
    console.print(f"({time.monotonic() - started:.0f} s)", style="dim")


def answer_one(console: Console, model: str) -> int:
    """A question in 8 blocks, of which the answer alone would fill more. Returns what a block takes, in bytes."""
    params = SamplingParams(temperature=0.0, max_tokens=160)
    console.print("loading the model ...", style="dim")
    with LLM(model, num_blocks=8, max_model_len="auto", kv_policy=POLICY, kv_budget=64) as llm:
        prompt = llm.get_tokenizer().encode_chat([{"role": "user", "content": QUESTION}])
        [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        choice, stats = output.outputs[0], llm.stats()
    console.print(QUESTION, style="bold")
    console.print(f"  {choice.text.strip()}", markup=False)
    blocks = -(-(choice.num_kept + choice.num_evicted) // stats.usage.block_size)
    console.print(
        f"{choice.num_evicted} of {choice.num_kept + choice.num_evicted} tokens were evicted, so the text that "
        f"fills {blocks} blocks never held more than {stats.scheduler.peak_held_blocks} "
        f"({format_bytes(stats.scheduler.peak_held_blocks * stats.bytes_per_block)})\n",
        style="dim",
    )
    return stats.bytes_per_block


def compare_arms(model: str) -> Report:
    about = {"model": "smollm2-135m", "device": "this machine, one thread; seconds are those of its core"}
    config = BenchConfig(
        place=Place(partial(EngineStage, model=model, clock=CPUClock()), about),
        workloads=[Workload("demo", "eight texts of about 200 random tokens, all there at once", JOBS)],
        policies={POLICY: resolve_policy(POLICY)},
        ratios=(ERASED,),
        block_sizes=(BLOCK_SIZE,),
        num_blocks=NUM_BLOCKS,
        sweeps=False,
        probes=False,
        refill=False,
    )
    return ReclaimBench(config, lambda total: Lines()).run()


def arms_table(runs: dict[str, RunReport]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("blocks a\nrequest", "needed", "at once\n(mean)", "preempted", "computed\ntwice", "tokens\nmoved"):
        table.add_column(heading, justify="right")
    table.add_column("steps", justify="right")
    table.add_column("tokens\na second*", justify="right")
    for arm, run in runs.items():
        metrics = run.metrics
        table.add_row(
            arm,
            f"{metrics.retained_blocks:.1f}",
            f"{metrics.floor_blocks:.1f}",
            f"{metrics.mean_running:.1f}",
            str(metrics.preemptions),
            f"{computed_twice(run):,}",
            f"{metrics.tokens_copied:,}",
            str(metrics.steps),
            f"{metrics.throughput:.0f}",
        )
    return table


def same_victims(found: Report) -> str:
    if not all(one.has_same_victims for one in found.comparisons):
        return "The arms that evict did not lose the same tokens: a bug of ours, please report it."
    erased = next(run.metrics.tokens_erased for run in found.runs if run.arm == "vtoken")
    return f"native evicts nothing; the other three lost the same {erased:,} tokens (hashes of who died when agree)."


def about_speed(runs: dict[str, RunReport]) -> str:
    """Why it is as fast as it is, and no faster."""
    native, naive, vtoken = (runs[arm] for arm in ("native", "naive", "vtoken"))
    ours, theirs = vtoken.metrics, native.metrics
    gain = ours.throughput / theirs.throughput
    told = "faster than native" if gain > 1.05 else "slower than native" if gain < 0.95 else "about as fast as native"
    step = {arm: run.metrics.seconds / run.metrics.steps * 1e3 for arm, run in runs.items()}
    return (
        f"Speed: vtoken was {told} here ({gain:.2f} x). With {ours.mean_running:.1f} requests at once instead of "
        f"{theirs.mean_running:.1f} it took {ours.steps} steps instead of {theirs.steps}, and computed "
        f"{computed_twice(vtoken):,} tokens twice instead of {computed_twice(native):,}. But on a CPU a step takes the "
        f"longer the more requests are in it: {step['vtoken']:.0f} ms on the mean, against {step['native']:.0f}; and "
        f"the policy's sums of attention cost time too, which naive pays without having more at once "
        f"({naive.metrics.mean_running:.1f} requests, {step['naive']:.0f} ms). On a GPU a step mostly reads weights, "
        "whoever shares it: `vtoken bench reclaim --quick` simulates one."
    )


def in_one_sentence(runs: dict[str, RunReport], bytes_per_block: int) -> str:
    naive, vtoken = runs["naive"].metrics, runs["vtoken"].metrics
    sizes = [
        format_bytes(round(blocks * bytes_per_block)) for blocks in (naive.retained_blocks, vtoken.retained_blocks)
    ]
    return (
        f"The same {vtoken.tokens_erased:,} tokens died in both: naive eviction kept {naive.retained_blocks:.1f} "
        f"blocks ({sizes[0]}) a request all the same, vtoken {vtoken.retained_blocks:.1f} ({sizes[1]}; the least there "
        f"can be is {vtoken.floor_blocks:.1f}), moving {vtoken.tokens_copied:,} tokens "
        f"({format_bytes(vtoken.bytes_copied)}) to get there."
    )


def computed_twice(run: RunReport) -> int:
    """Tokens that a preemption threw away. The last token of an answer is drawn and never computed."""
    return run.metrics.tokens_computed - sum(job.num_tokens - 1 for job in JOBS)


if __name__ == "__main__":
    main()
