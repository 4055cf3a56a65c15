"""Linear layers of the demo model's shapes: every candidate at many row counts, against the machine's own limits.

Kernels take turns call by call, each cycling over copies of its weight that exceed the caches; medians of rounds. The
bandwidth is that of a plain sum over memory, the peak that of the quickest float32 product seen in the same run so far.
With one thread the clock is the thread's own CPU time, which other processes on the machine disturb least.

    OMP_NUM_THREADS=1 python benchmarks/bench_linear.py [--rows 1 8 64] [--shapes 576x960] [--kernels vtoken_g4 onednn]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch

from vtoken.kernels.compiler import ISA_FLAGS
from vtoken.linear import KERNELS, PreparedLinear
from vtoken.linear.measure import sample_weight

SHAPES = ["576x960", "576x576", "576x3072", "1536x576", "576x49152"]
ROWS = [1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
CYCLE_BYTES = 64 << 20
ROUND_SECONDS = 0.05
LOGITS_ROWS = 256  # the last layer sees one row a sequence, never a whole prompt


def clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def read_bandwidth() -> float:
    """Bytes a second of the best of several sums over memory."""
    buffer, now, best = torch.zeros(64 << 20), clock(), 0.0
    for _ in range(8):
        started = now()
        buffer.sum()
        best = max(best, buffer.nbytes / (now() - started))
    return best


def copies(name: str, out_features: int, in_features: int) -> list[PreparedLinear]:
    weight = sample_weight(out_features, in_features, torch.float32)
    first = KERNELS[name].prepare(weight, None)
    # torch keeps the weight itself, so each copy needs its own.
    return [first, *(KERNELS[name].prepare(weight.clone(), None) for _ in range(CYCLE_BYTES // first.nbytes))]


def measure(candidates: dict[str, list[PreparedLinear]], x: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds a call in each round."""
    now = clock()
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for linears in candidates.values():
        linears[0](x)
    started = now()
    next(iter(candidates.values()))[-1](x)
    calls = max(1, min(40, int(ROUND_SECONDS / (now() - started))))
    turn = 0
    for _ in range(rounds):
        for name, linears in candidates.items():
            started = now()
            for i in range(calls):
                linears[(turn + i) % len(linears)](x)
            taken[name].append((now() - started) / calls)
        turn += calls
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="in x out, such as 576x960")
    parser.add_argument("--kernels", nargs="+", default=[k for k in KERNELS if KERNELS[k].unavailable() is None])
    parser.add_argument("--isa", choices=ISA_FLAGS, default="native", help="kernels built for a lesser machine")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ISA_FLAGS["native"] = ISA_FLAGS[args.isa]  # before anything is compiled
    warnings.filterwarnings("ignore", "torch.quantize_per")
    bandwidth = read_bandwidth()
    print(f"{torch.get_num_threads()} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s\n")
    print("| shape | rows | kernel | us | p10-p90 | GFLOP/s | GB/s | of bandwidth | of best float | of oneDNN |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    peak = 0.0
    for shape in args.shapes:
        in_features, out_features = map(int, shape.split("x"))
        candidates = {name: copies(name, out_features, in_features) for name in args.kernels}
        for rows in args.rows:
            if out_features > 8192 and rows > LOGITS_ROWS:
                continue
            flops = 2 * rows * in_features * out_features
            taken = measure(candidates, torch.randn(rows, in_features), args.rounds)
            medians = {name: statistics.median(times) for name, times in taken.items()}
            peak = max(peak, *(flops / s for name, s in medians.items() if KERNELS[name].holding != "int8"), 0.0)
            for name, seconds in medians.items():
                times = sorted(taken[name])
                spread = f"{times[len(times) // 10] * 1e6:,.0f}-{times[9 * len(times) // 10] * 1e6:,.0f}"
                rate = candidates[name][0].nbytes / seconds
                cells = [f"{in_features} -> {out_features}", str(rows), name, f"{seconds * 1e6:,.0f}", spread]
                cells += [f"{flops / seconds / 1e9:.1f}", f"{rate / 1e9:.1f}", f"{rate / bandwidth:.0%}"]
                cells.append(f"{flops / seconds / peak:.0%}" if peak else "-")
                cells.append(f"{medians['onednn'] / seconds:.2f}" if "onednn" in medians else "-")
                print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nbest float32 product: {peak / 1e9:.1f} GFLOP/s; read bandwidth after: {read_bandwidth() / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
