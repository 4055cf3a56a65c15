"""Prefill attention of the CPU kernels against the processor's arithmetic peak and torch's own attention.

The peak is that of a loop of multiply-adds that touches registers only. Each round times, one after the other: the
peak, our kernel, our kernel gathering statistics, and `scaled_dot_product_attention` over keys and values that were
gathered beforehand. Printed are GFLOP/s, counting what a query has to see and nothing else, as median (10th to 90th
percentile) over the rounds; the share of the peak and the ratios are medians of each round's own. Below the name of a
statistic stands the rate with it over that without.
On one thread the clock counts processor time, so that a busy machine matters little.

    python benchmarks/bench_prefill_attention.py [--threads 1 --rounds 9]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from vtoken.attention.cache import CachePlane, LayerCache
from vtoken.attention.cpu import CpuAttention
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.spec import AttentionSpec
from vtoken.base.kv_format import KV_FORMATS
from vtoken.kernels.compiler import ISA_FLAGS, SOURCES, find_compiler
from vtoken.memory import bits
from vtoken.policies.statistics import AttentionStatistic, CountLow, Sum, SumLast
from vtoken.quant.kv_format import encode
from vtoken.schedule.plan import StatisticOrder

BLOCK_SIZE = 16

# Twelve chains hide the latency of a multiply-add; the empty assembly keeps the compiler from leaving them out.
CHAINS = range(12)
PEAK = f"""
#include "simd.h"
using namespace vtoken;
extern "C" double multiply_adds(int64_t times, int threads) {{
#pragma omp parallel num_threads(threads)
  {{
    const Vec x = splat(0.999f), y = splat(1e-3f);
    Vec {", ".join(f"a{i} = splat({i}.0f)" for i in CHAINS)};
    for (int64_t k = 0; k < times; ++k) {{
      {" ".join(f"a{i} = fma(a{i}, x, y);" for i in CHAINS)}
      asm volatile("" : {", ".join(f'"+x"(a{i})' for i in CHAINS)});
    }}
  }}
  return 2.0 * {len(CHAINS)} * kLanes * times * threads;
}}
"""


def multiply_adds() -> Callable[[int, int], float]:
    """A function of (times, threads) that does nothing but multiply-adds and returns how many operations they were."""
    compiler = find_compiler()
    assert compiler is not None, "this benchmark needs a C++ compiler"
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "peak.cpp", Path(folder) / "peak.so"
        source.write_text(PEAK)
        flags = [
            "-std=c++20",
            "-O3",
            "-march=native",
            "-ffp-contract=fast",
            "-fopenmp",
            "-fPIC",
            "-shared",
            "-Wno-psabi",
        ]
        subprocess.run([*compiler, *flags, "-I", str(SOURCES), "-o", str(made), str(source)], check=True)
        function = ctypes.CDLL(str(made)).multiply_adds
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_int], ctypes.c_double
    return function


@dataclass(frozen=True)
class Load:
    """One slice: `num_new` tokens after a past of `past`, of which `dead` more rows died at random places."""

    name: str
    heads: tuple[int, int, int]  # query heads, KV heads, width
    num_new: int
    past: int = 0
    dead: int = 0
    kv: str = "float32"

    @property
    def flops(self) -> float:
        num_heads, _, head_dim = self.heads
        return 4.0 * head_dim * num_heads * sum(self.past + i + 1 for i in range(self.num_new))


STATISTICS: dict[str, AttentionStatistic] = {
    "mass": Sum(),
    "mass of the last 64": SumLast(64),
    "low counts of the last 64": CountLow(64),
}

SMOL, LLAMA = (9, 3, 64), (32, 8, 128)
LOADS = [
    Load("from scratch", SMOL, 4096),
    Load("paged past", SMOL, 512, past=3584),
    Load("paged past, half of it dead", SMOL, 512, past=3584, dead=3584),
    Load("paged past", SMOL, 512, past=3584, kv="bfloat16"),
    Load("paged past", SMOL, 512, past=3584, kv="int8"),
    Load("short", SMOL, 256),
    Load("short chunk, long past", SMOL, 32, past=16384),
    Load("from scratch", LLAMA, 1024),
    Load("no groups", (8, 8, 64), 2048),
    Load("odd width", (8, 2, 80), 2048),
]


class Bench:
    def __init__(self, load: Load, num_threads: int) -> None:
        self.load = load
        self.backend = CpuAttention(num_threads)
        num_heads, num_kv_heads, head_dim = load.heads
        self.spec = AttentionSpec(scale=head_dim**-0.5)
        rng = np.random.default_rng(0)
        num_rows = load.past + load.dead
        num_entries = -(-(num_rows + load.num_new) // BLOCK_SIZE)
        table = rng.permutation(num_entries).astype(np.int32)
        live = np.zeros(num_entries * BLOCK_SIZE, dtype=bool)
        rows = np.sort(rng.permutation(num_rows)[: load.past])
        live[rows] = True
        packed = np.packbits(live.reshape(num_entries, BLOCK_SIZE), axis=1, bitorder="little")
        masks = np.zeros((1, num_entries, bits.words_per_block(BLOCK_SIZE)), dtype=np.uint32)
        masks.view(np.uint8)[0, :, : packed.shape[1]] = packed

        self.q = torch.randn(load.num_new, num_heads, head_dim)
        self.k, self.v = torch.randn(2, load.num_new, num_kv_heads, head_dim)
        form = KV_FORMATS[load.kv]
        blocks, offsets = (
            torch.from_numpy(table[rows // BLOCK_SIZE].astype(np.int64)),
            torch.from_numpy(rows % BLOCK_SIZE),
        )
        planes, gathered = [], []
        for own in (self.k, self.v):
            cells, scales = encode(form, torch.full((num_entries, num_kv_heads, BLOCK_SIZE, head_dim), torch.nan))
            plane = CachePlane(cells, scales, form)
            past = plane.write(torch.randn(load.past, num_kv_heads, head_dim), blocks, offsets)
            gathered.append(torch.cat([past, own]).transpose(0, 1)[None].contiguous())
            planes.append(plane)
        self.cache = LayerCache(*planes)
        self.gathered = self.q.transpose(0, 1)[None].contiguous(), *gathered
        self.visible = torch.ones(load.num_new, load.past + load.num_new, dtype=torch.bool).tril(load.past)
        self.meta = AttentionMetadata(
            block_size=BLOCK_SIZE,
            starts=[0, load.num_new],
            positions=np.arange(num_rows, num_rows + load.num_new, dtype=np.int64),
            write_rows=np.arange(num_rows, num_rows + load.num_new, dtype=np.int32),
            block_tables=table[None],
            masks=masks,
            past_live=np.array([load.past], dtype=np.int32),
            row_positions=None,
        )

    def ours(self, statistic: AttentionStatistic | None = None) -> torch.Tensor:
        meta = replace(self.meta, tallies=[], _tally_of={})
        if statistic is not None:
            end = int(meta.positions[-1]) + 1
            first = 0 if statistic.last is None else end - statistic.last
            meta.add(StatisticOrder(statistic, np.zeros(1, np.int32), np.array([first])))
        return self.backend.attend(self.spec, self.q, self.k, self.v, self.cache, meta)

    def torchs(self) -> torch.Tensor:
        how = {"attn_mask": self.visible} if self.load.past else {"is_causal": True}
        return F.scaled_dot_product_attention(*self.gathered, **how, enable_gqa=True)


def measure(load: Load, num_threads: int, rounds: int, peak: Callable[[int, int], float]) -> str:
    bench = Bench(load, num_threads)
    torch.testing.assert_close(bench.ours(), bench.torchs()[0].transpose(0, 1), atol=1e-4, rtol=0)
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    # Short loads are repeated until the clock is fine enough.
    times = max(1, int(2e8 / load.flops))

    def rate(act: Callable[[], object]) -> float:
        started = clock()
        for _ in range(times):
            act()
        return times * load.flops / (clock() - started) / 1e9

    acts: dict[str, Callable[[], object]] = {
        "ours": bench.ours,
        **{title: partial(bench.ours, statistic) for title, statistic in STATISTICS.items()},
        "torch": bench.torchs,
    }
    found: dict[str, list[float]] = {name: [] for name in ("peak", *acts)}
    for _ in range(rounds):
        started = clock()
        operations = peak(2_000_000, num_threads)
        found["peak"].append(operations / (clock() - started) / 1e9)
        for name, act in acts.items():
            found[name].append(rate(act))

    def cell(name: str) -> str:
        rates = sorted(found[name])
        return f"{statistics.median(rates):.0f} ({rates[len(rates) // 10]:.0f}-{rates[len(rates) * 9 // 10]:.0f})"

    def ratio(name: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(found[name], found[to], strict=True))

    size = f"{load.num_new} after {load.past}" if load.past else f"{load.num_new}"
    shape = f"{load.heads[0]}/{load.heads[1]} x {load.heads[2]}"
    cells = [load.name, shape, load.kv, size, *map(cell, ("peak", "ours", "torch"))]
    cells += [f"{ratio('ours', 'peak'):.0%}", f"{ratio('ours', 'torch'):.2f}"]
    cells += [f"{ratio(title, 'ours'):.2f}" for title in STATISTICS]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=ISA_FLAGS, default="native", help="kernels built for a lesser machine")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    ISA_FLAGS["native"] = ISA_FLAGS[args.isa]  # before anything is compiled
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    peak = multiply_adds()
    print(f"{args.threads} thread(s), GFLOP/s")
    print(f"| load | heads | KV | tokens | peak | ours | torch | of peak | to torch | {' | '.join(STATISTICS)} |")
    print("|---|---|---|---|---|---|---|---|---|" + "---|" * len(STATISTICS))
    for load in LOADS:
        print(measure(load, args.threads, args.rounds, peak), flush=True)


if __name__ == "__main__":
    main()
