"""Decode attention of the CPU kernels against the rate at which this machine reads memory at all.

One cache of `--gigabytes` (beyond every processor cache) holds the pasts of `--sequences` sequences of `--context`
tokens; each call attends one new token a sequence over the whole of it. A plain read of the same bytes, by all threads,
is timed before every call, and what is printed is the ratio of the two: median over `--rounds`, with the 10th and the
90th percentile. So a busy machine slows both; where others take whole cores, `--clock cpu` counts seconds that threads
ran (divided by their number) instead of those that went by.

    python benchmarks/bench_attention.py [--threads 2 --rounds 15 --clock wall]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine has it; threads that wait must not count as running

import torch
from torch import Tensor

from vtoken.attention.cache import CachePlane, LayerCache
from vtoken.attention.cpu import CpuAttention
from vtoken.attention.metadata import AttentionMetadata, Tally
from vtoken.attention.spec import AttentionSpec
from vtoken.base.kv_format import KV_FORMATS
from vtoken.kernels.compiler import find_compiler
from vtoken.memory import bits
from vtoken.policies.statistics import AttentionStatistic, CountLow, Sum
from vtoken.quant.kv_format import STORAGE
from vtoken.schedule.plan import StatisticOrder

BLOCK_SIZE = 16

# Eight sums of 64 bytes at a time: nothing but reading.
PLAIN_READ = r"""
#include <cstdint>
typedef int64_t Line __attribute__((vector_size(64)));
extern "C" int64_t plain_read(const Line* from, int64_t lines, int threads) {
  int64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
  for (int64_t part = 0; part < lines / 1024; ++part) {
    Line sums[8] = {};
    const Line* p = from + part * 1024;
    for (int i = 0; i < 1024; i += 8)
      for (int j = 0; j < 8; ++j) sums[j] += p[i + j];
    for (int j = 1; j < 8; ++j) sums[0] += sums[j];
    total += sums[0][0] + sums[0][7];
  }
  return total;
}
"""


def plain_read() -> Callable[[Tensor, int], None]:
    """A function that reads a tensor's memory once."""
    compiler = find_compiler()
    assert compiler is not None, "this benchmark needs a C++ compiler"
    folder = Path(tempfile.mkdtemp())
    (folder / "read.cpp").write_text(PLAIN_READ)
    made = folder / "read.so"
    flags = ["-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi"]
    subprocess.run([*compiler, *flags, "-o", str(made), str(folder / "read.cpp")], check=True)
    function = ctypes.CDLL(str(made)).plain_read
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]

    def read(x: Tensor, num_threads: int) -> None:
        function(x.data_ptr(), x.nbytes // 64, num_threads)

    return read


def memory(nbytes: int, huge: bool) -> Tensor:
    """Bytes on pages of 4 KB, or on huge pages where the system grants them."""
    # Private: a shared mapping, which is Python's default, gets huge pages by another setting, mostly off.
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


class Bench:
    """One cache and the pasts in it."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        name: str,
        sequences: int,
        context: int,
        *,
        nbytes: int,
        scattered: bool,
        huge: bool,
    ) -> None:
        self.num_heads, num_kv_heads, head_dim = heads
        form = KV_FORMATS[name]
        entries = context // BLOCK_SIZE
        elements = num_kv_heads * BLOCK_SIZE * head_dim
        # Several times the pasts, in turn, so that a short one does not stay in the caches either.
        per_layer = sequences * entries
        self.num_layers = max(1, nbytes // (2 * per_layer * elements * form.bytes_per_element))
        self.num_blocks = per_layer * self.num_layers
        self.data = memory(2 * self.num_blocks * elements * form.bytes_per_element, huge)
        shape = (2, self.num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
        cells = self.data.view(STORAGE[name]).view(shape)
        if cells.dtype.is_floating_point:
            cells.normal_()
        else:
            cells.random_(-127 if name == "int8" else 0, 120)
        scales = torch.rand(2, *shape[1:4]) / 100 if form.has_scales else (None, None)
        self.cache = LayerCache(CachePlane(cells[0], scales[0], form), CachePlane(cells[1], scales[1], form))
        self.past_bytes = 2 * per_layer * elements * form.bytes_per_element
        self.past_bytes += 2 * per_layer * num_kv_heads * BLOCK_SIZE * 4 * form.has_scales

        self.q = torch.randn(sequences, self.num_heads, head_dim)
        self.k, self.v = torch.randn(2, sequences, num_kv_heads, head_dim)
        order = np.arange(self.num_blocks, dtype=np.int32)
        if scattered:
            np.random.default_rng(0).shuffle(order)
        self.metas = [self._meta(table, context) for table in order.reshape(self.num_layers, sequences, entries)]
        self.spec = AttentionSpec(scale=head_dim**-0.5)
        self.turn = 0

    def _meta(self, table: np.ndarray, context: int) -> AttentionMetadata:
        sequences, entries = table.shape
        # A last entry for the new token, of which nothing is past.
        table = np.concatenate([table, table[:, :1]], axis=1)
        masks = np.zeros((sequences, entries + 1, bits.words_per_block(BLOCK_SIZE)), dtype=np.uint32)
        masks[:, :entries] = bits.full_block(BLOCK_SIZE)
        return AttentionMetadata(
            block_size=BLOCK_SIZE,
            starts=list(range(sequences + 1)),
            positions=np.full(sequences, context, dtype=np.int64),
            write_rows=np.full(sequences, context, dtype=np.int32),
            block_tables=np.ascontiguousarray(table),
            masks=masks,
            past_live=np.full(sequences, context, dtype=np.int32),
            row_positions=None,
        )

    def attend(self, backend: CpuAttention, statistic: AttentionStatistic | None = None) -> None:
        """Over the next of the pasts, gathering a statistic of all sequences."""
        meta = replace(self.metas[self.turn % self.num_layers], tallies=self.tallies(statistic))
        self.turn += 1
        backend.attend(self.spec, self.q, self.k, self.v, self.cache, meta)

    @cache  # noqa: B019 - memory for what is gathered is taken once a step, not once a layer
    def tallies(self, statistic: AttentionStatistic | None) -> list[Tally]:
        meta = replace(self.metas[0], tallies=[], _tally_of={})
        if statistic is not None:
            everyone = np.arange(meta.num_slices, dtype=np.int32)
            meta.add(StatisticOrder(statistic, everyone, np.zeros(len(everyone), np.int64)))
        return meta.tallies


def huge_bytes() -> int:
    """Bytes of this process that lie on huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


def compare(
    title: str, first: Callable[[CpuAttention], None], second: Callable[[CpuAttention], None], args: argparse.Namespace
) -> None:
    """Time of the first over that of the second, call by call in turn."""
    clock = time.perf_counter if args.clock == "wall" else lambda: time.process_time() / args.threads
    backend = CpuAttention(num_threads=args.threads)
    ratios = []
    for _ in range(args.rounds + 2):
        taken = []
        for attend in (first, second):
            start = clock()
            attend(backend)
            taken.append(clock() - start)
        ratios.append(taken[0] / taken[1])
    ratios = sorted(ratios[2:])
    low, high = ratios[len(ratios) // 10], ratios[9 * len(ratios) // 10]
    print(f"| {title} | {statistics.median(ratios):.3f} | {low:.3f}-{high:.3f} |", flush=True)


def measure(
    title: str,
    bench: Bench,
    read: Callable[[Tensor, int], None],
    args: argparse.Namespace,
    statistic: AttentionStatistic | None,
) -> None:
    backend = CpuAttention(num_threads=args.threads)
    part = bench.data[: bench.past_bytes // 65536 * 65536]
    clock = time.perf_counter if args.clock == "wall" else lambda: time.process_time() / args.threads
    shares, rates, tokens = [], [], []
    for i in range(args.rounds + 2):
        others = bench.turn % bench.num_layers * part.nbytes % max(1, bench.data.nbytes - part.nbytes) // 64 * 64
        start = clock()
        read(bench.data[others : others + part.nbytes], args.threads)
        plain = part.nbytes / (clock() - start)
        start = clock()
        bench.attend(backend, statistic)
        taken = clock() - start
        if i >= 2:
            rates.append(plain / 1e9)
            shares.append(bench.past_bytes / taken / plain)
            tokens.append(bench.past_bytes / taken / 1e9)
    shares.sort()
    spread = f"{shares[len(shares) // 10]:.0%}-{shares[9 * len(shares) // 10]:.0%}"
    granted = min(1.0, huge_bytes() / bench.data.nbytes)
    per_token = bench.past_bytes / (len(bench.q) * (bench.metas[0].positions[0]))
    mega_tokens = statistics.median(tokens) * 1e3 / per_token
    print(
        f"| {title} | {statistics.median(rates):.1f} | {max(rates):.1f} | {statistics.median(tokens):.1f} | "
        f"{max(tokens):.1f} | {statistics.median(shares):.0%} | {spread} | {mega_tokens:.1f} | {granted:.0%} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--gigabytes", type=float, default=0.6)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", default="", help="run only the rows whose title holds this")
    args = parser.parse_args()
    read = plain_read()
    small = (9, 3, 64)
    mass = {"statistic": Sum()}
    rows: list[tuple[str, tuple[int, int, int], str, dict[str, Any]]] = [
        ("9/3 x 64 float32, consecutive", small, "float32", {"scattered": False}),
        ("9/3 x 64 float32, consecutive, 4 KB pages", small, "float32", {"scattered": False, "huge": False}),
        ("9/3 x 64 float32", small, "float32", {}),
        ("9/3 x 64 float32, 4 KB pages", small, "float32", {"huge": False}),
        ("9/3 x 64 float32, mass", small, "float32", mass),
        ("9/3 x 64 float32, low counts", small, "float32", {"statistic": CountLow(64)}),
    ]
    rows += [(f"9/3 x 64 {name}", small, name, {}) for name in KV_FORMATS if name != "float32"]
    rows += [("9/3 x 64 int8, mass", small, "int8", mass)]
    rows += [
        (f"{heads}/{kv_heads} x {width} {name}", (heads, kv_heads, width), name, {})
        for heads, kv_heads, width in ((12, 12, 64), (32, 8, 128), (8, 1, 64), (14, 2, 64))
        for name in ("float32", "int8")
    ]
    print(
        f"{args.threads} threads, {args.sequences} sequences of {args.context}, blocks of {BLOCK_SIZE} at random places"
    )
    print("on huge pages, unless said otherwise; GB/s, and million tokens of past a second")
    print("| cache | plain read | best | attention | best | share | p10-p90 | Mtokens/s | on huge pages |")
    print("|---|---|---|---|---|---|---|---|---|")
    for title, heads, name, how in rows:
        if args.only not in title:
            continue
        bench = Bench(
            heads,
            name,
            args.sequences,
            args.context,
            nbytes=int(args.gigabytes * 1e9),
            scattered=how.get("scattered", True),
            huge=how.get("huge", True),
        )
        measure(title, bench, read, args, how.get("statistic"))

    print("\n| tokens a second over float32's, call by call in turn | ratio | p10-p90 |")
    print("|---|---|---|")
    nbytes = int(args.gigabytes * 1e9)
    for heads in (small, (12, 12, 64), (32, 8, 128), (8, 1, 64), (14, 2, 64)):
        for name in [name for name in KV_FORMATS if name != "float32"] if heads == small else ["int8"]:
            title = f"{heads[0]}/{heads[1]} x {heads[2]} {name}"
            if args.only not in title:
                continue
            first, second = (
                Bench(heads, form, args.sequences, args.context, nbytes=nbytes, scattered=True, huge=True)
                for form in ("float32", name)
            )
            compare(title, first.attend, second.attend, args)

    print("\n| time with a statistic over that without, call by call in turn | ratio | p10-p90 |")
    print("|---|---|---|")
    for heads, name in ((small, "float32"), (small, "int8"), ((32, 8, 128), "float32"), ((14, 2, 64), "float32")):
        for statistic in (Sum(), CountLow(64)):
            title = f"{heads[0]}/{heads[1]} x {heads[2]} {name}, {type(statistic).__name__}"
            if args.only not in title:
                continue
            bench = Bench(heads, name, args.sequences, args.context, nbytes=nbytes, scattered=True, huge=True)
            compare(title, partial(bench.attend, statistic=statistic), bench.attend, args)


if __name__ == "__main__":
    main()
