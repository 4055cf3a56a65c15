"""`ModelRunner`: one plan's forward pass, from token ids to drawn tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.attention.base import AttentionBackend
from vtoken.attention.cache_statistics import FutureQueries
from vtoken.attention.cpu import CpuAttention
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.rotation import Rotation
from vtoken.attention.scan import CacheScan
from vtoken.models.base import CausalLM
from vtoken.policies.statistics import AttentionStatistic, FutureAttention
from vtoken.schedule.plan import NO_CANDIDATES, NO_SCORES, Candidates, SamplingBatch, StepPlan, TokenScores
from vtoken.worker.kv_store import KVStore
from vtoken.worker.logit_rules import apply_rules
from vtoken.worker.queries import QueryMemory
from vtoken.worker.replay import Replays
from vtoken.worker.sampler import sample
from vtoken.worker.scoring import candidates, score, score_rows


@dataclass(frozen=True, eq=False)
class RunnerOutput:
    tokens: NDArray[np.int32]  # [N] one a draw; -1 where it failed
    errors: dict[int, str]  # draw -> reason
    statistics: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # see `StepResult`
    scores: TokenScores = NO_SCORES
    drawn: TokenScores = NO_SCORES
    candidates: Candidates = NO_CANDIDATES


class ModelRunner:
    """Runs plans on a model, its KV store and an attention backend."""

    def __init__(self, model: CausalLM, store: KVStore, backend: AttentionBackend) -> None:
        self._model = model
        self._store = store
        self._backend = backend
        self._replays = Replays(model, backend) if isinstance(backend, CpuAttention) else None
        self._queries = QueryMemory(model.spec)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> RunnerOutput:
        """Compute the plan's tokens, leave their KV in the store and draw what is to be drawn."""
        unknown = {type(order.statistic) for order in plan.statistics} - self._backend.statistics
        assert not unknown, f"statistics {unknown} were planned for a backend that cannot give them"
        if not plan.num_slices:
            assert not len(plan.sampling), "a draw needs a slice"
            return RunnerOutput(np.zeros(0, np.int32), {})
        meta = AttentionMetadata.from_plan(plan)
        hidden = self._forward(plan, meta)
        drawn = self._draw(plan.sampling, self._logits(plan, hidden))
        scores = score(self._model.logits, hidden, plan.scoring)
        return replace(drawn, statistics=self._statistics(plan, meta), scores=scores)

    def _draw(self, batch: SamplingBatch, logits: Tensor) -> RunnerOutput:
        """One token a row of `logits`, which are overwritten, and what is to be said of some rows."""
        # Copies of what no rule has changed, for the few that ask for it.
        of_scored = logits[torch.from_numpy(batch.scored)] if len(batch.scored) else None
        of_searched = logits[torch.from_numpy(batch.searched)] if len(batch.searched) else None
        compiled = self._backend.compiled
        broken = {} if batch.rules is None else apply_rules(logits, batch.rules, compiled=compiled)
        tokens, errors = sample(logits, batch, compiled=compiled)
        found = RunnerOutput(tokens, errors | broken)
        if of_scored is not None:
            # A draw that failed has no token; its request ends, whatever is said of another one.
            found = replace(found, drawn=score_rows(of_scored, np.maximum(tokens[batch.scored], 0), batch.num_top))
        if of_searched is not None:
            ruled = logits[torch.from_numpy(batch.searched)]
            found = replace(found, candidates=candidates(of_searched, ruled, batch.num_candidates))
        return found

    def _forward(self, plan: StepPlan, meta: AttentionMetadata) -> Tensor:
        """[T, hidden_size]"""
        specs = self._model.spec.layers
        slots = torch.from_numpy(plan.write_slots.astype(np.int64))
        queries = self._queries.begin(plan)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            if queries is not None:
                queries.take(layer, qkv)
            # Written for all slices before any attends: one may have matched blocks that another fills in this plan.
            spec, cache = specs[layer], self._store.layers[layer]
            q, k, v = self._backend.write(qkv, spec.pick(rotations), cache, slots)
            out = self._backend.attend(spec, q, k, v, cache, meta).flatten(1)
            return out if out.dtype == qkv.dtype else out.to(qkv.dtype)

        token_ids, positions = torch.from_numpy(plan.token_ids.astype(np.int64)), torch.from_numpy(meta.positions)
        x, rotations = self._model.embed(token_ids, positions), self._model.rotations(positions, _rope_lengths(plan))
        if queries is not None:  # no tape can take them
            hidden = self._model.decode(x, attend)
            queries.commit()
            return hidden
        if self._replays is not None:
            return self._replays.decode(x, rotations, slots, meta, attend)
        return self._model.decode(x, attend)

    def _statistics(self, plan: StepPlan, meta: AttentionMetadata) -> dict[str, NDArray[np.float64]]:
        """What was gathered while queries attended, and what the cache says now."""
        if not plan.statistics:
            return {}

        def future(statistic: FutureAttention, s: int) -> FutureQueries:
            lane, next_position = int(plan.lanes[s]), int(plan.positions[plan.starts[s + 1] - 1]) + 1
            last = partial(self._queries.last, lane, statistic)
            rope_length = None if plan.rope_lengths is None else int(plan.rope_lengths[s])
            turns = self._turns_from(next_position, statistic.horizon, rope_length)
            return FutureQueries(last, turns, next_position)

        scan = CacheScan(self._store.layers, self._model.spec.layers, meta, plan.write_slots.astype(np.int64), future)
        return {
            order.statistic.name: meta.gathered(order)
            if isinstance(order.statistic, AttentionStatistic)
            else scan.read(order)
            for order in plan.statistics
        }

    def _turns_from(self, position: int, horizon: int, rope_length: int | None) -> tuple[Rotation, ...]:
        """How the next positions turn queries, as far as the sequence has positions."""
        limit = rope_length or self._model.spec.max_position_embeddings
        begin = min(position, limit - 1)
        positions = torch.arange(begin, min(begin + horizon, limit))
        return self._model.rotations(
            positions, None if rope_length is None else torch.full_like(positions, rope_length)
        )

    def _logits(self, plan: StepPlan, hidden: Tensor) -> Tensor:
        """[N, vocab_size] one row a draw, computed once a slice."""
        slices, row_of_draw = np.unique(plan.sampling.slices, return_inverse=True)
        last_tokens = torch.from_numpy(plan.starts[slices + 1].astype(np.int64) - 1)
        logits = self._model.logits(hidden[last_tokens])
        # The usual case, a draw a slice in order, needs no copy of what may be the largest tensor of a step.
        is_identity = len(row_of_draw) == len(slices) and np.array_equal(row_of_draw, np.arange(len(slices)))
        return logits if is_identity else logits[torch.from_numpy(row_of_draw)]


def _rope_lengths(plan: StepPlan) -> Tensor | None:
    """[T] of each token, see `StepPlan.rope_lengths`."""
    if plan.rope_lengths is None:
        return None
    return torch.from_numpy(np.repeat(plan.rope_lengths, np.diff(plan.starts)))
