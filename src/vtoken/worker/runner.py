"""`ModelRunner`: one plan's forward pass, from token ids to drawn tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.attention.base import AttentionBackend
from vtoken.attention.metadata import AttentionMetadata
from vtoken.models.base import CausalLM
from vtoken.schedule.plan import StepPlan
from vtoken.worker.kv_store import KVStore
from vtoken.worker.sampler import sample


@dataclass(frozen=True, eq=False)
class RunnerOutput:
    tokens: NDArray[np.int32]  # [N] one a draw; -1 where it failed
    errors: dict[int, str]  # draw -> reason
    statistics: dict[str, NDArray[np.float64]]  # name -> [S, rows]


class ModelRunner:
    """Runs plans on a model, its KV store and an attention backend."""

    def __init__(self, model: CausalLM, store: KVStore, backend: AttentionBackend) -> None:
        self._model = model
        self._store = store
        self._backend = backend

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> RunnerOutput:
        """Compute the plan's tokens, leave their KV in the store and draw what is to be drawn."""
        unknown = set(plan.statistics) - self._backend.statistics
        assert not unknown, f"statistics {unknown} were planned for a backend that cannot give them"
        meta = AttentionMetadata.from_plan(plan)
        if not plan.num_slices:
            assert not len(plan.sampling), "a draw needs a slice"
            return RunnerOutput(np.zeros(0, np.int32), {}, meta.statistics)
        hidden = self._forward(plan, meta)
        tokens, errors = sample(self._logits(plan, hidden), plan.sampling)
        return RunnerOutput(tokens, errors, meta.statistics)

    def _forward(self, plan: StepPlan, meta: AttentionMetadata) -> Tensor:
        """[T, hidden_size]"""
        specs = self._model.spec.layers
        slots = torch.from_numpy(plan.write_slots.astype(np.int64))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Written for all slices before any attends: one may have matched blocks that another fills in this plan.
            k, v = self._store.write(layer, k, v, slots)
            keys, values = self._store.keys[layer], self._store.values[layer]
            return self._backend.attend(specs[layer], q, k, v, keys, values, meta)

        token_ids = torch.from_numpy(plan.token_ids.astype(np.int64))
        return self._model.hidden_states(token_ids, torch.from_numpy(meta.positions), attend)

    def _logits(self, plan: StepPlan, hidden: Tensor) -> Tensor:
        """[N, vocab_size] one row a draw, computed once a slice."""
        slices, row_of_draw = np.unique(plan.sampling.slices, return_inverse=True)
        last_tokens = torch.from_numpy(plan.starts[slices + 1].astype(np.int64) - 1)
        return self._model.logits(hidden[last_tokens])[torch.from_numpy(row_of_draw)]
