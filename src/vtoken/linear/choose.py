"""Choose a kernel for each shape by measuring the candidates, once a machine."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from math import exp, log
from typing import Final

from torch import Tensor

from vtoken.base.errors import ConfigError
from vtoken.base.registry import suggest
from vtoken.linear.base import LinearKernel, LinearShape, PreparedLinear
from vtoken.linear.measure import ROW_COUNTS, Timings, measured
from vtoken.linear.registry import BACKENDS, KERNELS, QUANTIZATIONS

WORTH_TIMING: Final = 1 << 17  # weights: below it a call's own cost hides what the kernel does

logger = logging.getLogger("vtoken")


@dataclass(frozen=True)
class LinearPlan:
    """A kernel for each shape of a model, and what was measured: microseconds by shape, kernel and number of rows."""

    kernels: dict[LinearShape, LinearKernel]
    timings: dict[LinearShape, Timings]

    def prepare(self, weight: Tensor, bias: Tensor | None, shape: LinearShape) -> PreparedLinear:
        """Pack one layer's weight [out, in] and bias [out] for the kernel chosen for its `shape`."""
        return self.kernels[shape].prepare(weight, bias)

    def summary(self) -> list[str]:
        """A line a shape for the start-up log."""
        lines = []
        for shape, kernel in self.kernels.items():
            times = self.timings.get(shape, {}).get(kernel.name, {})
            parts = [f"{microseconds:,.0f} us at {rows}" for rows, microseconds in times.items()]
            lines.append(
                f"linear {shape}: {kernel.name}" + (f" ({', '.join(parts)} rows, one thread)" if parts else "")
            )
        return lines


def choose(shapes: Collection[LinearShape], *, override: str = "auto", quantization: str | None = None) -> LinearPlan:
    """The quickest kernel for each shape among those that keep its weights exactly.

    `override` names a kernel or a group ("vtoken") to take instead, even one that rounds weights to fp16; a shape that
    it does not support is computed by torch, which is logged. `quantization="int8"` leaves only int8 kernels. The score
    is the geometric mean over `ROW_COUNTS` of a kernel's time relative to the quickest. Layers below `WORTH_TIMING` are
    not timed: the kernel that holds them smallest is taken. Raises ConfigError for names that are unknown, contradict
    each other, or that this machine cannot run.
    """
    named = _candidates(override, quantization)
    found: dict[LinearShape, list[LinearKernel]] = {}
    for shape in dict.fromkeys(shapes):
        able = [kernel for kernel in named if kernel.unsupported(shape) is None]
        # By its own name a kernel that rounds is what the user asked for.
        if override not in KERNELS and quantization is None:
            able = [kernel for kernel in able if kernel.keeps_exactly(shape)]
        if not able:
            reason = next((kernel.unsupported(shape) for kernel in named if kernel.unsupported(shape)), "nothing fits")
            logger.warning("linear %s: computed by torch, since %s %s", shape, override, reason)
            able = [KERNELS["torch"]]
        found[shape] = able
    worth_it = {shape: able for shape, able in found.items() if len(able) > 1 and shape.num_weights >= WORTH_TIMING}
    timings = measured(worth_it)
    kernels = {
        shape: KERNELS[best(timings[shape])] if shape in timings else min(able, key=_modesty)
        for shape, able in found.items()
    }
    return LinearPlan(kernels, timings)


def _modesty(kernel: LinearKernel) -> tuple[float, bool]:
    """Orders kernels by the memory they hold, those that keep rows apart before others."""
    return kernel.bytes_a_weight, not kernel.batch_invariant


def best(timings: Timings) -> str:
    """The kernel with the lowest geometric mean of its times relative to the quickest at each number of rows."""
    quickest = {rows: min(times[rows] for times in timings.values()) for rows in ROW_COUNTS}

    def score(name: str) -> float:
        return exp(sum(log(timings[name][rows] / quickest[rows]) for rows in ROW_COUNTS) / len(ROW_COUNTS))

    return min(timings, key=score)


def _candidates(override: str, quantization: str | None) -> list[LinearKernel]:
    if override not in BACKENDS:
        known = sorted(BACKENDS)
        raise ConfigError(f"unknown linear_backend {override!r}; {suggest(override, known)}known: {', '.join(known)}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(f"unknown quantization {quantization!r}; known: {', '.join(QUANTIZATIONS)}, or None")
    if override in KERNELS:
        kernel = KERNELS[override]
        reason = kernel.unavailable()
        if reason:
            raise ConfigError(f"linear_backend={override!r} cannot run here: {reason}; use 'auto'")
        if quantization != ("int8" if kernel.holding == "int8" else None):
            fix = "leave it out" if quantization else "set quantization='int8'"
            raise ConfigError(
                f"linear_backend={override!r} holds {kernel.holding} weights, which contradicts "
                f"quantization={quantization!r}; {fix}"
            )
        return [kernel]
    kernels = [kernel for kernel in KERNELS.values() if (kernel.holding == "int8") == (quantization is not None)]
    if override != "auto":
        kernels = [kernel for kernel in kernels if kernel.name.startswith(override)]
    reasons = [reason for kernel in kernels if (reason := kernel.unavailable())]
    kernels = [kernel for kernel in kernels if kernel.unavailable() is None]
    kernels = [kernel for kernel in kernels if not kernel.last_resort] or kernels
    if not kernels:
        what = f"quantization={quantization!r}" if override == "auto" else f"linear_backend={override!r}"
        raise ConfigError(f"{what} cannot run here: {reasons[0] if reasons else 'there is no such kernel'}")
    return kernels
