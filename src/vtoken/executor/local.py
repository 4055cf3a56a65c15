"""`LocalExecutor`: model and KV in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vtoken.attention.registry import BACKENDS
from vtoken.memory.copy import Copy, CopyCounts, CopyKind
from vtoken.models.base import CausalLM
from vtoken.planner.kv_memory import KVShape
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.worker.copy_engine import CopyEngine
from vtoken.worker.kv_store import KVStore
from vtoken.worker.runner import ModelRunner

_MEASURE_BYTES = 8 * 2**20  # KV copied in one measured swap: beyond the caches of a core
_MEASURE_ROWS = 256  # tokens of the measured product: a usual prefill chunk
_MEASURE_ROUNDS = 3


@dataclass(frozen=True)
class MeasuredCosts:
    """What decides between swapping a sequence out and computing it again."""

    copy_bytes_per_s: float
    """KV bytes moved between device and host store in a second, one way."""
    flops_per_s: float
    """Floating-point operations a second of a large matrix product in the model's dtype."""


class LocalExecutor:
    """Runs plans on one model in this process.

    `kv_shape` is that of both stores; `num_host_blocks` may be 0. Raises ConfigError for an unknown backend and
    for a pool that the system has no memory for.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        attention_backend: str = "reference",
        kv_shape: KVShape,
    ) -> None:
        self._model = model
        self.backend = BACKENDS[attention_backend]()
        self.store = KVStore(kv_shape, num_blocks, block_size)
        self.host_store = KVStore(kv_shape, num_host_blocks, block_size)
        self.copies = CopyEngine(self.store, self.host_store, compiled=self.backend.compiled)
        self._runner = ModelRunner(model, self.store, self.backend)

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.block_size == self.store.block_size, "plan and store disagree on the block size"
        self.copies.run(plan.copies)
        output = self._runner.run(plan)
        ended, failed = self.copies.poll(plan.awaited)
        return StepResult(
            step=plan.step,
            tokens=output.tokens,
            errors=output.errors,
            statistics=output.statistics,
            scores=output.scores,
            drawn=output.drawn,
            candidates=output.candidates,
            ended=ended,
            failed=failed,
        )

    def copy_counts(self) -> CopyCounts:
        return self.copies.counts()

    def close(self) -> None:
        self.copies.close()
        for store in (self.store, self.host_store):
            store.release()

    def measure_costs(self) -> MeasuredCosts:
        """Measure on scratch memory, the best of a few rounds; takes some tens of milliseconds."""
        return MeasuredCosts(self._measure_copy(), self._measure_matmul())

    def _measure_copy(self) -> float:
        block_size, shape = self.store.block_size, self.store.shape
        num_blocks = max(1, _MEASURE_BYTES // shape.bytes_per_block(block_size))
        scratch = [KVStore(shape, num_blocks, block_size) for _ in range(2)]
        slots = np.arange(num_blocks * block_size)
        engine = CopyEngine(*scratch, compiled=self.backend.compiled)
        out, back = (Copy(kind, slots, slots) for kind in (CopyKind.SWAP_OUT, CopyKind.SWAP_IN))
        for store in scratch:  # take the pages before the clock runs
            for tensor in store.tensors:
                tensor.zero_()
        return 2 * scratch[0].nbytes / _best_seconds(lambda: engine.run((out, back)))

    def _measure_matmul(self) -> float:
        dtype, width = next(self._model.parameters()).dtype, self._model.spec.hidden_size
        x, weight = torch.ones(_MEASURE_ROWS, width, dtype=dtype), torch.ones(width, 4 * width, dtype=dtype)
        return 2 * _MEASURE_ROWS * 4 * width**2 / _best_seconds(lambda: x @ weight)


def _best_seconds(work: Callable[[], object]) -> float:
    """Wall time of the fastest of a few rounds: what the machine can do when it is left alone."""
    rounds = []
    for _ in range(_MEASURE_ROUNDS):
        start = time.perf_counter()
        work()
        rounds.append(time.perf_counter() - start)
    return max(min(rounds), 1e-9)
