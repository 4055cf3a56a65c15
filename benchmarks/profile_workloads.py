"""Where the time of the peers' workloads goes, part by part, and how far each part is from what the machine allows.

Timers are put around the engine's parts from outside; what a part calls is counted where it belongs, so the rows of a
table add up to the step. Small steps, which in service are replayed in one call (`worker/replay.py`), go through Python
here: what a replay saves is most of their glue and of the other kernels. The floor of the matrix products is the larger
of their weights' bytes over the rate at which memory is read here and their operations over the rate of the best large
product; that of attention is the same of KV bytes and of scores and sums. Both rates are measured in the same process,
before and after each workload, and the best counts. Steps that compute prompt tokens are "prefill", the others
"decode".

    python -m benchmarks.profile_workloads [--workloads W1,W3 --scale 0.1 --quantization int8 --json profile.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_attention import memory, plain_read  # sets how OpenMP waits, so before torch
from benchmarks.peers.workloads import KV_GIB, MAX_MODEL_LEN, MAX_NUM_SEQS, WARM_UP, WORKLOADS, Workload

import torch  # isort: skip

from vtoken import LLM, SamplingParams
from vtoken.engine.text import IncrementalDetokenizer
from vtoken.kernels import fused
from vtoken.linear.base import LinearShape, PreparedLinear
from vtoken.linear.registry import KERNELS
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.models.layers import Embedding, Linear
from vtoken.schedule.plan import StepPlan
from vtoken.worker import replay, runner

# Parts in the order of the tables; "glue" is what is left of a step: torch's and Python's own time between the others.
PARTS = ("linear", "attention", "other kernels", "sampling", "scheduling", "books", "results", "text", "glue")
FLOORED = ("linear", "attention")
READ_BYTES = 1 << 29  # far beyond every cache
GEMM = (1024, 2048, 2048)  # rows, in, out of the product whose rate counts as the machine's


class Timers:
    """Nested timers: each moment counts for the innermost part that is open. Nanoseconds."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._since = 0
        self.spent: dict[str, int] = defaultdict(int)
        self.num_calls = 0

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed as `part`."""
        enter, leave = self.enter, self.leave

        def timed(*args: Any, **kwargs: Any) -> Any:
            enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                leave()

        return timed

    def enter(self, part: str) -> None:
        now = self._clock()
        if self._open:
            self.spent[self._open[-1]] += now - self._since
        self._open.append(part)
        self._since = now
        self.num_calls += 1

    def leave(self) -> None:
        now = self._clock()
        self.spent[self._open.pop()] += now - self._since
        self._since = now

    def take(self) -> tuple[dict[str, int], int]:
        """(nanoseconds by part, calls) since the last time."""
        taken = dict(self.spent), self.num_calls
        self.spent.clear()
        self.num_calls = 0
        return taken

    @staticmethod
    def cost_ns(rounds: int = 20_000) -> float:
        """What one timed call adds."""

        def nothing() -> None:
            pass

        timed = Timers().around("a", nothing)
        seconds = []
        for function in (timed, nothing) * 3:
            started = time.perf_counter_ns()
            for _ in range(rounds):
                function()
            seconds.append(time.perf_counter_ns() - started)
        return (min(seconds[0::2]) - min(seconds[1::2])) / rounds


@dataclass(frozen=True)
class Rates:
    """What this machine does at best."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


class Meter:
    """Measures the rates, again and again, and keeps the best."""

    def __init__(self, quantization: str | None) -> None:
        self._read, self._data = plain_read(), memory(READ_BYTES, huge=True).fill_(1)  # else all of it is one zero page
        rows, width, out = GEMM
        self._x = torch.randn(rows, width)
        weight = torch.randint(-8, 8, (out, width)).float() / 16
        shape = LinearShape(width, out, False, torch.float32)
        able = [kernel for kernel in KERNELS.values() if (kernel.holding == "int8") == (quantization == "int8")]
        able = [kernel for kernel in able if kernel.unavailable() is None and kernel.unsupported(shape) is None]
        self._linears = {kernel.name: kernel.prepare(weight, None) for kernel in able}
        self._seconds: dict[str, float] = {}
        self.measure()  # takes the pages, fills the caches of torch
        self._seconds.clear()

    def measure(self, rounds: int = 3) -> None:
        for _ in range(rounds):
            self._time("read", lambda: self._read(self._data, torch.get_num_threads()))
            for name, linear in self._linears.items():
                self._time(name, partial(linear, self._x))

    def _time(self, name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        self._seconds[name] = min(seconds, self._seconds.get(name, seconds))

    @property
    def best_product(self) -> str:
        """The kernel of the quickest large product."""
        return min(self._linears, key=lambda name: self._seconds[name])

    @property
    def rates(self) -> Rates:
        rows, width, out = GEMM
        flops = 2 * rows * width * out / self._seconds[self.best_product]
        return Rates(self._data.nbytes / self._seconds["read"], flops)


@dataclass(frozen=True)
class Work:
    """What a step cannot do without."""

    linear_bytes: int
    linear_flops: int
    attention_bytes: int
    attention_flops: int


class Model:
    """The sizes from which the work of a step follows."""

    def __init__(self, llm: LLM) -> None:
        executor: Any = llm.engine.executor
        model = executor._model
        self._spec, self._shape, head = model.spec, executor.store.shape, model.lm_head
        modules = [module for module in model.modules() if isinstance(module, Linear)]
        self._layers = [_prepared(module) for module in modules if module is not head]
        self._head = _prepared(head)

    def work(self, plan: StepPlan) -> Work:
        counts, past = np.diff(plan.starts).astype(np.int64), plan.past_live.astype(np.int64)
        # Every new token sees the past and those of its chunk up to itself.
        pairs = int((counts * past + counts * (counts + 1) // 2).sum())
        spec, num_drawn = self._spec, len(np.unique(plan.sampling.slices))
        head_bytes = self._head.nbytes if num_drawn else 0
        elements = sum(linear.in_features * linear.out_features for linear in self._layers)
        head_elements = self._head.in_features * self._head.out_features
        return Work(
            linear_bytes=sum(linear.nbytes for linear in self._layers) + head_bytes,
            linear_flops=2 * (plan.num_tokens * elements + num_drawn * head_elements),
            attention_bytes=int(past.sum()) * self._shape.bytes_per_token,
            attention_flops=4 * pairs * spec.num_layers * spec.num_heads * spec.head_dim,
        )

    @property
    def kinds(self) -> set[type[PreparedLinear]]:
        return {type(linear) for linear in (*self._layers, self._head)}


def _prepared(linear: Linear) -> PreparedLinear:
    assert linear.prepared is not None, "the compiled backend prepares its linears"
    return linear.prepared


@dataclass
class Step:
    is_prefill: bool
    seconds: dict[str, float]  # by part
    calls: int
    work: Work | None = None


@contextmanager
def attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, and put back what was there."""
    before = []
    for owner, name, value in changes:
        before.append((owner, name, name in vars(owner), vars(owner).get(name)))
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, was_own, value in reversed(before):
            if was_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)  # the class's, or a base class's, shows again


@dataclass
class Profiler:
    """Runs an engine's steps with timers around its parts."""

    llm: LLM
    timers: Timers = field(default_factory=Timers)

    def __post_init__(self) -> None:
        self.model = Model(self.llm)
        self._steps: list[Step] = []
        self._plan: StepPlan | None = None

    def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[list[Step], float]:
        """(steps, seconds of the whole call)."""
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self._steps = []
        with attributes(self._timed_parts()):
            started = time.perf_counter()
            self.llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
        for step in self._steps:
            assert all(value >= 0 for value in step.seconds.values())
        return self._steps, seconds

    def _timed_parts(self) -> list[tuple[Any, str, Any]]:
        """What is replaced by what: (owner, name, timed)."""
        around, engine = self.timers.around, self.llm.engine
        executor: Any = engine.executor
        scheduler, books, backend = engine.scheduler, engine.scheduler.memory, executor.backend
        named: list[tuple[str, Any, list[str]]] = [
            *(("linear", kind, [n for n in ("__call__", "add_to") if hasattr(kind, n)]) for kind in self.model.kinds),
            *(("other kernels", kind, ["rows"]) for kind in self.model.kinds),
            ("attention", backend, ["attend"]),
            ("other kernels", backend, ["write"]),
            ("other kernels", fused, _functions_of(fused)),
            ("other kernels", Embedding, ["forward"]),
            ("sampling", runner, ["sample"]),
            ("scheduling", scheduler, ["schedule", "apply"]),
            ("books", books, [n for n, f in getmembers(KVCacheManager, isfunction) if n[0] != "_" and n != "check"]),
            ("results", engine, ["_report"]),
            ("text", IncrementalDetokenizer, ["push"]),
        ]
        if engine.tokenizer is not None:
            named.append(("text", engine.tokenizer, ["encode", "decode"]))
        changes = [(owner, name, around(part, getattr(owner, name))) for part, owner, names in named for name in names]
        schedule = next(timed for owner, name, timed in changes if owner is scheduler and name == "schedule")

        def remembering() -> StepPlan | None:
            self._plan = schedule()
            return self._plan

        changes.append((scheduler, "schedule", remembering))
        changes.append((engine, "step", self._stepping(around("glue", engine.step))))
        return changes

    def _stepping(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def stepping() -> Any:
            self.timers.take()
            outputs = step()
            spent, calls = self.timers.take()
            plan = self._plan
            if plan is not None and plan.num_slices:
                seconds = {part: spent.get(part, 0) / 1e9 for part in PARTS}
                self._steps.append(Step(plan.num_tokens > plan.num_slices, seconds, calls, self.model.work(plan)))
            return outputs

        return stepping


def _functions_of(module: Any) -> list[str]:
    return [n for n, f in getmembers(module, isfunction) if f.__module__ == module.__name__ and n[0] != "_"]


@dataclass
class Phase:
    """Means over the steps of one kind, milliseconds."""

    steps: int
    ms: dict[str, float]
    floor_ms: dict[str, float]
    timers_ms: float  # what the timers themselves add

    @classmethod
    def of(cls, steps: Sequence[Step], rates: Rates, timer_ns: float) -> Phase | None:
        if not steps:
            return None
        count = len(steps)
        ms = {part: 1e3 * sum(step.seconds[part] for step in steps) / count for part in PARTS}
        works = [step.work for step in steps if step.work is not None]
        floors = {
            "linear": sum(rates.floor_s(work.linear_bytes, work.linear_flops) for work in works),
            "attention": sum(rates.floor_s(work.attention_bytes, work.attention_flops) for work in works),
        }
        calls = sum(step.calls for step in steps)
        return cls(count, ms, {p: 1e3 * s / count for p, s in floors.items()}, calls / count * timer_ns / 1e6)

    @property
    def step_ms(self) -> float:
        return sum(self.ms.values())

    def share(self, *parts: str) -> float:
        return sum(self.ms[part] for part in parts) / self.step_ms


def table(phases: dict[str, Phase | None]) -> list[str]:
    """Markdown: a row a part; for each phase its milliseconds, share of the step, floor and distance from it."""
    found = {name: phase for name, phase in phases.items() if phase is not None}
    header, rule = ["part"], ["---"]
    for name, phase in found.items():
        header += [f"{name} ms ({phase.steps} steps)", "share", "floor ms", "x floor"]
        rule += ["---"] * 4
    lines = [_row(header), _row(rule)]
    for part in PARTS:
        cells = [part]
        for phase in found.values():
            floor = phase.floor_ms.get(part)
            cells += [f"{phase.ms[part]:.3f}", f"{phase.share(part):.1%}"]
            cells += ["", ""] if not floor else [f"{floor:.3f}", f"{phase.ms[part] / floor:.2f}"]
        lines.append(_row(cells))
    cells = ["**step**"]
    for phase in found.values():
        floor = sum(phase.floor_ms.values())
        cells += [f"{phase.step_ms:.3f}", "100%", f"{floor:.3f}", f"{phase.step_ms / floor:.2f}"]
    return [*lines, _row(cells)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def scaled(workload: Workload, scale: float) -> tuple[int, int]:
    """(prompt tokens, answer tokens): lengths shrink, the number of requests stays."""
    answer = workload.output_tokens if workload.output_tokens == 1 else max(4, round(workload.output_tokens * scale))
    return max(8, round(workload.prompt_tokens * scale)), answer


def profile(profiler: Profiler, meter: Meter, workload: Workload, scale: float, seed: int) -> dict[str, Any]:
    """Run one workload and print its table."""
    random, vocab_size = np.random.default_rng(seed), profiler.llm.engine.facts.vocab_size
    prompt_tokens, output_tokens = scaled(workload, scale)
    prompts = random.integers(0, vocab_size, (workload.num_requests, prompt_tokens)).tolist()
    timer_ns = Timers.cost_ns()
    meter.measure()
    steps, seconds = profiler.run(prompts, output_tokens)
    meter.measure()
    rates = meter.rates
    phases = {
        "prefill": Phase.of([step for step in steps if step.is_prefill], rates, timer_ns),
        "decode": Phase.of([step for step in steps if not step.is_prefill], rates, timer_ns),
    }
    inside = sum(sum(step.seconds.values()) for step in steps)
    print(
        f"\n{workload.name}: {workload.num_requests} x ({prompt_tokens} + {output_tokens}), {seconds:.2f} s, ", end=""
    )
    print(f"{seconds - inside:.2f} s of it outside steps; memory read at {rates.bytes_per_s / 1e9:.1f} GB/s, ", end="")
    print(f"best product ({meter.best_product}) {rates.flops_per_s / 1e9:.0f} GFLOP/s\n")
    print("\n".join(table(phases)))
    for name, phase in phases.items():
        if phase is not None:
            print(f"\n{name}: scheduling and books {phase.share('scheduling', 'books'):.2%} of a step; ", end="")
            print(f"the timers add {phase.timers_ms:.3f} ms ({phase.timers_ms / phase.step_ms:.2%})")
    sys.stdout.flush()
    return {
        "workload": workload.name,
        "requests": workload.num_requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": seconds,
        "outside_steps_s": seconds - inside,
        "rates": asdict(rates),
        "best_product": meter.best_product,
        "phases": {name: None if phase is None else asdict(phase) for name, phase in phases.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="W1,W2,W3,W4", help="names, with commas between them")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of prompts and answers")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here too")
    settings = parser.add_argument_group("the engine's settings")
    for name in ("dtype", "quantization", "kv-cache-dtype", "linear-backend"):
        settings.add_argument(f"--{name}")
    args = parser.parse_args()
    chosen = args.workloads.split(",")
    offered = {name: workload for name, workload in WORKLOADS.items() if workload.kind != "arrivals"}
    if unknown := set(chosen) - set(offered):
        parser.error(f"unknown workloads {sorted(unknown)}; known: {', '.join(offered)}")
    torch.set_num_threads(args.threads)
    replay.MOST_TOKENS = 0  # a replayed step is one call, into which no timer reaches
    own = {name: getattr(args, name) for name in ("dtype", "quantization", "kv_cache_dtype", "linear_backend")}
    own = {name: value for name, value in own.items() if value is not None}

    meter, records = Meter(args.quantization), []
    with LLM(
        args.model,
        attention_backend="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        kv_memory=f"{KV_GIB}GiB",
        enable_prefix_caching=False,
        seed=0,
        **own,
    ) as llm:
        profiler = Profiler(llm)
        prompt_tokens, output_tokens = WARM_UP
        warm_up = [[i % llm.engine.facts.vocab_size for i in range(prompt_tokens)]]
        llm.generate(
            warm_up, SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True), use_tqdm=False
        )
        print(f"{args.model}, {args.threads} threads, {own or 'the settings as they are'}")
        for seed, name in enumerate(chosen):
            records.append(profile(profiler, meter, offered[name], args.scale, seed))
    if args.json:
        settings_used = {"model": args.model, "threads": args.threads, "scale": args.scale, "engine": own}
        args.json.write_text(json.dumps({"settings": settings_used, "workloads": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
