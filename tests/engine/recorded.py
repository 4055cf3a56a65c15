"""Run requests through a real engine and keep the bits of every logit that a token was drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from vtoken import LLM, SamplingParams
from vtoken.base.hashing import mix64
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.stats import EngineStats
from vtoken.schedule.plan import SamplingBatch
from vtoken.schedule.sequence import Sequence
from vtoken.worker import runner

# (seed of the request, choice, tokens generated before) -> the logits' bytes
Bits = dict[tuple[int, int, int], bytes]


@dataclass
class Recording:
    outputs: list[RequestOutput]
    stats: EngineStats
    bits: Bits = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[list[int]]]:
        return [[choice.token_ids for choice in output.outputs] for output in self.outputs]

    @property
    def died_at(self) -> list[list[dict[int, int]]]:
        return [[choice.died_at for choice in output.outputs] for output in self.outputs]


@dataclass(frozen=True)
class Demand:
    """A request with a seed of its own, which is its name in the recording."""

    prompt: list[int]
    seed: int
    params: dict[str, Any] = field(default_factory=dict)


def record(
    folder: Path,
    demands: list[Demand],
    evict: Callable[[Sequence, int], list[int]] | None = None,
    **settings: Any,
) -> Recording:
    """Answer all demands at once. `evict(sequence, length)` names the positions that die when a sequence has computed
    `length` tokens; it is asked once for each length, and not when a sequence comes back after a preemption."""
    bits: Bits = {}
    drawn = runner.sample

    def sample(logits: Tensor, batch: SamplingBatch, *, compiled: bool) -> tuple[np.ndarray, dict[int, str]]:
        for row, key in enumerate(
            zip(batch.seeds.tolist(), batch.choices.tolist(), batch.indices.tolist(), strict=False)
        ):
            bits[key] = logits[row].numpy().tobytes()
        return drawn(logits, batch, compiled=compiled)

    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(str(folder), **({"attention_backend": "reference", "skip_tokenizer_init": True} | settings)) as llm,
    ):
        patch.setattr(runner, "sample", sample)
        engine = llm.engine
        for i, demand in enumerate(demands):
            engine.add_request(str(i), demand.prompt, SamplingParams(seed=demand.seed, **demand.params))
        outputs: dict[str, RequestOutput] = {}
        evicted: dict[Sequence, int] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
            engine.scheduler.check()
            if evict is not None:
                _evict(engine.scheduler, evict, evicted)
        assert engine.stats().usage.held_blocks == 0
        return Recording([outputs[str(i)] for i in range(len(demands))], engine.stats(), bits)


def _evict(scheduler: Any, evict: Callable[[Sequence, int], list[int]], evicted: dict[Sequence, int]) -> None:
    lengths = scheduler.memory.tokens.lengths
    for request in scheduler.running:
        for sequence in request.sequences:
            if sequence.lane is None or lengths[sequence.lane] <= evicted.get(sequence, -1):
                continue
            length = int(lengths[sequence.lane])
            positions = evict(sequence, length)
            if positions:
                live = set(scheduler.memory.tokens.live(sequence.lane)[1].tolist())
                scheduler.evict(sequence, [position for position in positions if position in live])
            evicted[sequence] = length


def scattered(every: int) -> Callable[[Sequence, int], list[int]]:
    """While a sequence decodes, at every `every`-th length: about a third of the older tokens, all over the text."""

    def victims(sequence: Sequence, length: int) -> list[int]:
        if length <= sequence.request.num_prompt_tokens or length % every:
            return []
        positions = np.arange(length - 2)
        hashes = mix64(positions, length, sequence.request.seed, sequence.choice)
        return positions[hashes % np.uint64(3) == 0].tolist()

    return victims
