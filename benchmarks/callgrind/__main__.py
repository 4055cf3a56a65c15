"""Instructions of a decode step with and without the token-level machinery, counted by callgrind; nothing is evicted.

Three builds of the same step of the demo model, on one thread and for AVX2 (valgrind knows no AVX-512):

- full: the engine as it is;
- plain: what a cache of blocks alone would do. Its kernels read all cells up to the length of the past, without masks
  (`plain_past.h`), its books keep block tables and lengths only (`plain_books.py`), no deaths are replayed;
- twice: as full, but the kernels look for live cells twice, which bounds what they spend on it at all.

They must draw the same tokens, which is tried at full speed first. What the machinery costs is full - plain, its share
is that of the plain step. Valgrind takes many minutes for the matrix products, which are the same in all three: they
are counted once, with the whole step of "full", and left out elsewhere.

    python -m benchmarks.callgrind [--batch 64 --context 512 --jobs 2 --json counts.json]

Takes about ten minutes on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.callgrind.counts import PARTS, cost, instructions
from benchmarks.callgrind.variants import PASTS, write_sources

ROOT = Path(__file__).parents[2]
LIMIT = 0.01  # of a decode step


class Counter:
    """Runs the worker, below valgrind and without."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder, self._steps = folder, args.steps
        self._options = [f"--{name}={getattr(args, name)}" for name in ("model", "linear", "batch", "context", "steps")]
        # One thread and a fixed hash seed: the same instructions each time.
        fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        self._env = os.environ | fixed

    def compile(self, variant: str) -> None:
        self._run([], variant, ["--compile"])

    def tokens(self, variant: str) -> str:
        """What the variant draws, at full speed."""
        return self._run([], variant, ["--random-kv"])

    def instructions(self, variant: str, *, products: bool) -> dict[str, float]:
        """A step, by part."""
        name = f"{variant}.{'whole' if products else 'rest'}"
        out = f"--callgrind-out-file={self._folder / name}"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", out]
        self._run(valgrind, variant, [] if products else ["--without-products"])
        print(f"counted {name}", file=sys.stderr, flush=True)
        dumps = [path for path in self._folder.glob(f"{name}.*") if path.suffix[1:].isdigit()]
        return instructions(dumps, self._steps)

    def _run(self, prefix: list[str], variant: str, more: list[str]) -> str:
        worker = [sys.executable, "-m", "benchmarks.callgrind.worker", variant, str(self._folder)]
        command = [*prefix, *worker, *self._options, *more]
        done = subprocess.run(command, env=self._env, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-4000:]}")
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--linear", default="vtoken_f32", help="linear backend; it is not measured below valgrind")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1, help="decode steps that are counted")
    parser.add_argument("--jobs", type=int, default=2, help="how many are counted at the same time")
    parser.add_argument("--json", type=Path, help="write the counts here too")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not on the path")
    with tempfile.TemporaryDirectory() as name:
        write_sources(Path(name))
        counter = Counter(Path(name), args)
        for variant in PASTS:
            counter.compile(variant)
        if len({counter.tokens(variant) for variant in PASTS}) != 1:
            sys.exit("the variants drew different tokens: the comparison would mean nothing")
        runs = {"whole step, full": ("full", True)} | {variant: (variant, False) for variant in PASTS}
        with ThreadPoolExecutor(args.jobs) as pool:
            counting = [pool.submit(counter.instructions, variant, products=whole) for variant, whole in runs.values()]
            counts = {run: each.result() for run, each in zip(runs, counting, strict=True)}

    found = cost(counts["whole step, full"], *(counts[variant] for variant in ("full", "plain", "twice")))
    print(f"{args.model}, {args.linear}, batch {args.batch}, context {args.context}: instructions of a decode step;")
    print("but for the first row without matrix products\n")
    print(f"| build | {' | '.join(PARTS)} | sum |")
    print("|---|---|---|---|---|")
    for run, parts in counts.items():
        print(f"| {run} | {' | '.join(f'{parts[part]:,.0f}' for part in PARTS)} | {sum(parts.values()):,.0f} |")
    print(f"\nbooks {found.books:+,.0f} ({found.books / found.step:.3%}), kernels {found.kernels:+,.0f}", end=" ")
    print(
        f"({found.kernels / found.step:.3%}): {found.share:.3%} of a step of {found.step:,.0f}; were all of finding",
        end=" ",
    )
    print(f"live cells ({found.finding:,.0f}) due to masks, {found.bound:.3%}")
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        record = {"settings": settings, "instructions": counts, "cost": asdict(found), "share": found.share}
        args.json.write_text(json.dumps(record | {"bound": found.bound}, indent=1) + "\n")
    if found.share >= LIMIT:
        sys.exit(f"the token-level machinery costs {found.share:.2%}, the limit is {LIMIT:.0%}")


if __name__ == "__main__":
    main()
