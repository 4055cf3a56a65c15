"""What it costs to read statistics off the cache, in steps of decode attention.

A cache of the demo model's shape (SmolLM2-135M: 30 layers, 9 query and 3 KV heads of 64 elements) holds sequences whose
tokens lie at random places. Timed in turn are the attention of one decode step of all layers by the compiled kernels,
and one reading of each statistic for all sequences, fixed ones for all of their tokens. Printed is the median over
`--rounds` with the 10th and the 90th percentile, and the reading as a number of such steps: a policy with a stride of
64 tokens spreads it over 64 of them. On one thread the clock counts processor time, so that a busy machine matters
little.

    python benchmarks/bench_statistics.py [--rounds 5 --threads 1 --only KeyNorm]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from vtoken.attention.cache_statistics import FutureQueries
from vtoken.attention.cpu import CpuAttention
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.rotation import Rotation
from vtoken.attention.scan import CacheScan
from vtoken.attention.spec import AttentionSpec
from vtoken.base.kv_format import KV_FORMATS
from vtoken.memory import bits
from vtoken.planner.kv_memory import KVShape
from vtoken.policies.statistics import (
    CacheStatistic,
    FutureAttention,
    KeyNorm,
    KeyRedundancy,
    KeySimilarity,
    LagDeviation,
    ValueNorm,
)
from vtoken.schedule.plan import StatisticOrder
from vtoken.worker.kv_store import KVStore

BLOCK_SIZE = 16
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
STATISTICS: list[CacheStatistic] = [
    KeyNorm(),
    ValueNorm(),
    KeySimilarity(),
    KeyRedundancy(),
    LagDeviation(lag=128, sinks=4),
    FutureAttention(),
]


class Bench:
    """Sequences of `num_live` tokens each, and a plan that brings one more to each of them."""

    def __init__(self, num_sequences: int, num_live: int, kv: str, num_threads: int) -> None:
        entries = -(-(num_live + 1) // BLOCK_SIZE)
        num_blocks = num_sequences * entries
        self.store = KVStore(KVShape(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, kv), num_blocks, BLOCK_SIZE)
        blocks, offsets = (
            x.flatten() for x in torch.meshgrid(torch.arange(num_blocks), torch.arange(BLOCK_SIZE), indexing="ij")
        )
        for layer in self.store.layers:
            common = torch.randn(1, NUM_KV_HEADS, HEAD_DIM)  # as keys of real models have it
            layer.keys.write(torch.randn(len(blocks), NUM_KV_HEADS, HEAD_DIM) + common, blocks, offsets)
            layer.values.write(torch.randn(len(blocks), NUM_KV_HEADS, HEAD_DIM), blocks, offsets)
        rng = np.random.default_rng(0)
        tables = rng.permutation(num_blocks).astype(np.int32).reshape(num_sequences, entries)
        live = np.arange(entries * BLOCK_SIZE) < num_live
        packed = np.packbits(live.reshape(entries, BLOCK_SIZE), axis=1, bitorder="little")
        masks = np.zeros((num_sequences, entries, bits.words_per_block(BLOCK_SIZE)), dtype=np.uint32)
        masks.view(np.uint8)[:, :, : packed.shape[1]] = packed
        self.meta = AttentionMetadata(
            block_size=BLOCK_SIZE,
            starts=list(range(num_sequences + 1)),
            positions=np.full(num_sequences, num_live, dtype=np.int64),
            write_rows=np.full(num_sequences, num_live, dtype=np.int32),
            block_tables=tables,
            masks=masks,
            past_live=np.full(num_sequences, num_live, dtype=np.int32),
            row_positions=None,
        )
        self.write_slots = tables[:, num_live // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + num_live % BLOCK_SIZE
        self.specs = [AttentionSpec(scale=HEAD_DIM**-0.5)] * NUM_LAYERS
        self.backend = CpuAttention(num_threads)
        self.q = torch.randn(num_sequences, NUM_HEADS, HEAD_DIM)
        self.k, self.v = torch.randn(2, num_sequences, NUM_KV_HEADS, HEAD_DIM)
        queries = torch.randn(NUM_LAYERS, 128, NUM_HEADS, HEAD_DIM)
        angles = torch.arange(512.0)[:, None] * 0.8 ** torch.arange(HEAD_DIM // 2)
        self.future = FutureQueries(queries.__getitem__, [Rotation(angles.cos(), angles.sin())], num_live + 1)

    def attend(self) -> None:
        for layer, spec in zip(self.store.layers, self.specs, strict=True):
            self.backend.attend(spec, self.q, self.k, self.v, layer, self.meta)

    def read(self, statistic: CacheStatistic) -> None:
        everyone = np.arange(self.meta.num_slices, dtype=np.int32)
        order = StatisticOrder(statistic, everyone, np.zeros(len(everyone), np.int64))
        scan = CacheScan(self.store.layers, self.specs, self.meta, self.write_slots, lambda *_: self.future)
        scan.read(order)


def seconds(act: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    act()
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="read only statistics whose name holds this")
    parser.add_argument("--kv", default="float32", choices=KV_FORMATS)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print(f"{args.threads} thread(s), {args.kv}; ms")
    print("| sequences x live tokens | statistic | decode attention | reading | p10-p90 | in steps |")
    print("|---|---|---|---|---|---|")
    for num_sequences, num_live in ((1, 2048), (32, 512)):
        bench = Bench(num_sequences, num_live, args.kv, args.threads)
        bench.attend()
        for statistic in STATISTICS:
            if args.only not in type(statistic).__name__:
                continue
            steps, taken = [], []
            for _ in range(args.rounds):
                steps.append(seconds(bench.attend, clock))
                taken.append(seconds(lambda: bench.read(statistic), clock))  # noqa: B023 - called at once
            taken.sort()
            ratio = statistics.median(taken) / statistics.median(steps)
            spread = f"{taken[len(taken) // 10] * 1e3:.1f}-{taken[len(taken) * 9 // 10] * 1e3:.1f}"
            print(
                f"| {num_sequences} x {num_live} | {type(statistic).__name__} | {statistics.median(steps) * 1e3:.2f} | "
                f"{statistics.median(taken) * 1e3:.1f} | {spread} | {ratio:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
