"""Runs below callgrind: decode steps of the demo model, counted part by part. Prints the drawn tokens as JSON.

    valgrind --tool=callgrind --instr-atstart=no python -m benchmarks.callgrind.worker VARIANT FOLDER ...

The prompts are not computed: what their KV would be does not change how many instructions a decode step takes. Nor do
the results of matrix products, so these can be left out where they are counted already. With `--random-kv` the cache
holds numbers as if they were: then what is drawn depends on which cells were read.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.callgrind.counts import NOTHING
from benchmarks.callgrind.plain_books import PlainBooks
from benchmarks.callgrind.variants import PASTS, Requests, use
from vtoken import LLM, SamplingParams
from vtoken.kernels.library import library
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.models.layers import Linear
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.scheduler import Scheduler


def engine(args: argparse.Namespace) -> LLM:
    """The engine with the variant's kernels and books, and its prompts scheduled but not computed."""
    size = 16
    blocks_each = -(-(args.context + args.steps + size) // size) + 1
    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        attention_backend="cpu",
        linear_backend=args.linear,
        block_size=size,
        num_blocks=args.batch * blocks_each,
        max_model_len=args.context + args.steps + 2 * size,
        max_num_seqs=args.batch,
        max_num_batched_tokens=args.batch * (args.context + size),
        enable_prefix_caching=False,
    )
    if args.variant == "plain":
        made = llm.engine.scheduler
        books = PlainBooks(made.memory.pool.num_blocks, size, enable_prefix_caching=False)
        llm.engine.scheduler = Scheduler(made.config, books, made._clock)
        llm.engine.scheduler._residents.replay_deaths = lambda lanes: None  # type: ignore[method-assign]
    assert isinstance(llm.engine.scheduler.memory, PlainBooks if args.variant == "plain" else KVCacheManager)
    return llm


def no_products(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """In place of `Linear.__call__`."""
    return torch.zeros(len(x), self.out_features)


class Steps:
    """Steps of one engine, each part dumped under its name."""

    def __init__(self, llm: LLM, dump: Callable[[str], None]) -> None:
        self._scheduler, self._executor = llm.engine.scheduler, llm.engine.executor
        self._dump = dump
        self._random = np.random.default_rng(0)

    def add(self, lengths: Sequence[int]) -> None:
        """Queue prompts and let them in, not computed."""
        for i, length in enumerate(lengths):
            prompt = self._random.integers(0, 1000, length).tolist()
            self._scheduler.add(str(i), prompt, SamplingParams(temperature=0.0, ignore_eos=True), seed=i)
        while self._scheduler.num_waiting:
            plan = self._plan()
            tokens = self._random.integers(0, 1000, len(plan.sampling)).astype(np.int32)
            self._scheduler.apply(StepResult(plan.step, tokens))

    def decode(self) -> list[int]:
        """One step: the tokens drawn."""
        plan = self._plan()
        assert plan.num_tokens == plan.num_slices, "a prompt is not through yet"
        self._dump("schedule")
        result = self._executor.execute(plan)
        self._dump("execute")
        drawn = self._scheduler.apply(result)
        self._dump("apply")
        return [token for _, token in drawn]

    def _plan(self) -> StepPlan:
        plan = self._scheduler.schedule()
        assert plan is not None
        return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=PASTS)
    parser.add_argument("folder", type=Path, help="where `write_sources` has written")
    parser.add_argument("--model", required=True)
    parser.add_argument("--linear", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--without-products", action="store_true", help="matrix products give zeros at no cost")
    parser.add_argument("--random-kv", action="store_true", help="fill the cache, so that tokens tell what was read")
    parser.add_argument("--compile", action="store_true", help="only compile what is needed, outside valgrind")
    args = parser.parse_args()
    use(args.variant, args.folder)
    requests = Requests(args.folder)
    if args.compile:
        library()
        return

    if args.without_products:
        Linear.__call__ = no_products  # type: ignore[method-assign]
    with engine(args) as llm:
        if args.random_kv:
            torch.manual_seed(0)
            for tensor in llm.engine.executor.store.tensors:  # type: ignore[attr-defined]
                tensor.normal_()
        warm_up = Steps(llm, lambda name: None)
        warm_up.add([8])
        warm_up.decode()  # whatever is done once a process is done here
        llm.engine.scheduler.abort("0")
        steps = Steps(llm, requests.dump)
        # Lengths spread over a block, so that in every step as many sequences need a new one.
        steps.add([args.context - 16 + i % 16 for i in range(args.batch)])
        gc.collect()
        gc.disable()
        requests.start()
        requests.dump("start")
        requests.dump(NOTHING)
        drawn = [steps.decode() for _ in range(args.steps)]
        requests.stop()
    print(json.dumps(drawn))


if __name__ == "__main__":
    main()
