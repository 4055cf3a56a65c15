"""Time linear kernels on this machine and keep the times in the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch
from torch import Tensor

from vtoken.base.cache import cache_dir
from vtoken.kernels.compiler import SOURCES, machine_id
from vtoken.kernels.gemm import GROUP
from vtoken.linear.base import LinearKernel, LinearShape, PreparedLinear

logger = logging.getLogger("vtoken")

Timings = dict[str, dict[int, float]]  # microseconds on one thread by kernel and number of rows

ROW_COUNTS: Final = (1, 8, 64, 512)
ROUNDS: Final = 7
MIN_ROUNDS: Final = 3  # even where they take longer than
SECONDS: Final = 0.25  # for one shape at one number of rows
MAX_SPREAD: Final = 1.5  # median over minimum beyond which other processes decided the times
MAX_WEIGHTS: Final = 6 << 20  # larger layers are timed on their first outputs: time is proportional to those
FLUSH_BYTES: Final = 64 << 20  # read before a call, so that the weight comes from memory as in a model's step
FLUSHED_ROWS: Final = 64  # with more rows the weight's way into the caches no longer counts
VERSION: Final = "2"  # of what the times mean


def measured(candidates: Mapping[LinearShape, Sequence[LinearKernel]]) -> dict[LinearShape, Timings]:
    """Times of the candidates of each shape: from the cache where it has all of them, else measured now and kept.

    Seconds for a small model the first time.
    """
    if not candidates:
        return {}
    path = cache_dir() / "linear" / f"{_key()}.json"
    kept = _read(path)
    missing = {
        shape: kernels
        for shape, kernels in candidates.items()
        if not {kernel.name for kernel in kernels} <= kept.get(_label(shape), {}).keys()
    }
    if missing:
        started = time.perf_counter()
        spreads: list[float] = []
        for shape, kernels in missing.items():
            kept[_label(shape)] = measure(shape, kernels, spreads)
        logger.info("timed linear kernels on this machine in %.1f s", time.perf_counter() - started)
        if statistics.median(spreads) <= MAX_SPREAD:
            _write(path, kept)
        else:
            logger.warning("other processes keep this machine busy: linear kernels are timed again at the next start")
    return {
        shape: {kernel.name: kept[_label(shape)][kernel.name] for kernel in kernels}
        for shape, kernels in candidates.items()
    }


def measure(shape: LinearShape, kernels: Sequence[LinearKernel], spreads: list[float]) -> Timings:
    """Microseconds a call: the least of several rounds in which the kernels take turns.

    On one thread and by its own CPU time: with more, on a busy machine, a call takes as long as the system leaves one
    of them waiting, whatever the kernel. Medians over the least are added to `spreads`.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure_alone(shape, kernels, spreads)
    finally:
        torch.set_num_threads(num_threads)


def _measure_alone(shape: LinearShape, kernels: Sequence[LinearKernel], spreads: list[float]) -> Timings:
    out_features = min(shape.out_features, max(64, MAX_WEIGHTS // shape.in_features // 64 * 64))
    scale = shape.out_features / out_features
    weight = sample_weight(out_features, shape.in_features, shape.dtype)
    bias = torch.zeros(out_features, dtype=shape.dtype) if shape.has_bias else None
    prepared = {kernel.name: kernel.prepare(weight, bias) for kernel in kernels}
    flush = torch.zeros(FLUSH_BYTES // 4)
    timings: Timings = {name: {} for name in prepared}
    for rows in ROW_COUNTS:
        x = torch.randn(rows, shape.in_features, dtype=shape.dtype)
        samples: dict[str, list[float]] = {name: [] for name in prepared}
        deadline = time.perf_counter() + SECONDS
        for round_number in range(ROUNDS + 1):
            if round_number > MIN_ROUNDS and time.perf_counter() > deadline:
                break
            for name, linear in prepared.items():
                if rows <= FLUSHED_ROWS:
                    flush.sum()
                seconds = _time(linear, x)
                if round_number:  # the first round warms up
                    samples[name].append(seconds)
        for name, seconds_each in samples.items():
            timings[name][rows] = min(seconds_each) * 1e6 * scale
            spreads.append(statistics.median(seconds_each) / min(seconds_each))
    return timings


def sample_weight(out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """A weight [out, in] that every holding keeps exactly (g8 and g4 where `in` is a multiple of 32).

    Fifteen evenly spaced numbers from -127 / 256 on, the first of them in each group.
    """
    codes = torch.randint(0, 15, (out_features, in_features), generator=torch.Generator().manual_seed(0))
    codes[:, ::GROUP] = 0
    return ((17 * codes - 127).to(torch.float32) / 256).to(dtype)


def _time(linear: PreparedLinear, x: Tensor) -> float:
    started = time.thread_time()
    linear(x)
    return time.thread_time() - started


def _label(shape: LinearShape) -> str:
    bias = "+bias" if shape.has_bias else ""
    return f"{shape.in_features}x{shape.out_features}{bias} {shape.dtype} {','.join(sorted(shape.exact))}"


@cache
def _sources_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(SOURCES.glob("linear*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _key() -> str:
    """Everything that the times depend on, but for the shapes."""
    facts = (VERSION, machine_id(), torch.__version__, _sources_digest())
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=10).hexdigest()


def _read(path: Path) -> dict[str, Timings]:
    """What is kept there; nothing where it cannot be read, since it can always be measured again."""
    try:
        stored = json.loads(path.read_text())
        return {
            label: {name: {rows: float(times[str(rows)]) for rows in ROW_COUNTS} for name, times in kernels.items()}
            for label, kernels in stored.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(path: Path, kept: Mapping[str, Timings]) -> None:
    """Replace the file as a whole, so that another process never reads half of it."""
    work = path.with_name(f".{path.name}-{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.write_text(json.dumps(kept, indent=1))
        os.replace(work, path)
    except OSError as error:
        logger.warning("times of linear kernels cannot be kept (%s); they are measured again at each start", error)
