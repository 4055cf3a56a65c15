"""A real model in a pool too small for the work: four ways to deal with evicted tokens, and what each gives back.

    python examples/demo.py

The first run downloads the model (about 100 MB) and converts it; later runs start at once.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from vtoken import LLM, SamplingParams
from vtoken.base.units import format_bytes
from vtoken.bench import page, report, terminal
from vtoken.bench.configure import Asked, configure
from vtoken.bench.reclaim import ReclaimBench
from vtoken.bench.report import Report, RunReport
from vtoken.models.catalog import get_model

POLICY, ERASED = "h2o", 0.5
NUM_REQUESTS = 6
PAGE = Path("reclaim-demo.html")

QUESTION = "Why is the sky blue?"


def main() -> None:
    console = Console(highlight=False)
    folder = get_model("smollm2-135m", progress=console.print)
    console.rule("One answer, and what it lost")
    answer_one(console, str(folder))
    console.rule(f"{NUM_REQUESTS} requests in a pool for five: {ERASED:.0%} of every text dies by {POLICY}")
    found = compare_arms(str(folder))
    terminal.show(found, console)
    report.write(PAGE, page.to_html(found), "demo")
    console.print(f"\nThe whole report, with pictures: {PAGE.absolute()}")
    console.print(in_one_sentence(found), style="bold")


def answer_one(console: Console, model: str) -> None:
    """A question in 8 blocks, of which the answer alone would fill more."""
    params = SamplingParams(temperature=0.0, max_tokens=160)
    with console.status("loading the model"):
        llm = LLM(model, num_blocks=8, max_model_len="auto", kv_policy=POLICY, kv_budget=64)
    with llm:
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


def compare_arms(model: str) -> Report:
    asked = Asked(
        model=model,
        workloads=("chat",),
        policies=(POLICY,),
        ratios=(ERASED,),
        block_sizes=(16,),
        limit=NUM_REQUESTS,
        quick=True,
        sweeps=False,
    )
    bar = partial(tqdm, desc="Settings", unit="setting", disable=not sys.stderr.isatty())
    return ReclaimBench(configure(asked), lambda total: bar(total=total)).run()


def in_one_sentence(found: Report) -> str:
    runs: dict[str, RunReport] = {run.arm: run for run in found.runs}
    naive, vtoken = runs["naive"].metrics, runs["vtoken"].metrics
    return (
        f"The same {vtoken.tokens_erased:,} tokens died in both: naive eviction kept {naive.retained_blocks:.1f} "
        f"blocks a request all the same, vtoken {vtoken.retained_blocks:.1f} (the least there can be is "
        f"{vtoken.floor_blocks:.1f}), moving {vtoken.tokens_copied:,} tokens to get there."
    )


if __name__ == "__main__":
    main()
