"""Runs a task under every setting of a grid: one engine a KV format, one policy and budget after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vtoken.base.config import EngineConfig
from vtoken.base.errors import ConfigError, EngineError, RequestError
from vtoken.base.sampling_params import SamplingParams
from vtoken.engine.llm import LLM
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.text import Tokenizer
from vtoken.evals.meter import Meter
from vtoken.evals.setting import Grid, Setting, engine_settings
from vtoken.evals.task import Grade, Probe, Task
from vtoken.models.loader import read_limits, resolve_model
from vtoken.schedule.retention import KEEPS_ALL, RetentionSettings

Advance = Callable[[Setting], None]


@dataclass(frozen=True)
class Outcome:
    """What one setting cost, and what it was worth."""

    setting: Setting
    grade: Grade
    # Bytes of KV blocks a sequence, really held: mean while tokens that count were computed (None: there was none), and
    # the most at once.
    retained_bytes: float | None
    peak_bytes: int
    kept: float  # share of the texts' tokens that were alive in the end
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """All outcomes of a task, in the order of the grid."""

    model: str
    task: Task
    outcomes: tuple[Outcome, ...]

    @property
    def full(self) -> Outcome:
        """What the others are compared with: the full cache in the first format."""
        return self.outcomes[0]


def evaluate(
    model: str, task: Task, grid: Grid, engine: dict[str, Any], progress: Callable[[int], Advance]
) -> Evaluation:
    """Run everything. `engine` are settings of the engine that the user gave; `progress` is told how many requests
    there will be, and gives what is called after each of them.

    Raises ConfigError, RequestError or CheckpointError before the weights are read where that can be told, and
    EngineError for a request that fails.
    """
    settings = {name: engine_settings(name, engine) for name in grid.formats}
    folder = resolve_model(model)
    positions = read_limits(folder).max_position_embeddings
    if task.longest > positions:  # which might be more than there is memory for
        raise ConfigError(
            f"length: {task.longest:,} tokens are more than the {positions:,} that {model} has places for"
        )
    probes = task.prepare(Tokenizer.from_folder(engine.get("tokenizer") or folder))
    block_size = engine.get("block_size", EngineConfig.model_fields["block_size"].default)
    check_budgets(grid, probes, block_size=block_size)
    advance = progress(len(probes) * len(grid.settings))
    outcomes = []
    for kv_format in grid.formats:
        with LLM(model, **settings[kv_format]) as llm:
            meter = Meter(llm.engine.executor)
            llm.engine.executor = meter
            outcomes += [_run(llm, meter, task, probes, each, advance) for each in grid.of_format(kv_format)]
    return Evaluation(model, task, tuple(outcomes))


def check_budgets(grid: Grid, probes: Sequence[Probe], *, block_size: int) -> None:
    """Raise ConfigError for a budget or stride that cannot work with one of the texts."""
    for setting in grid.settings:
        if setting.policy is None:
            continue
        for probe in probes:
            own = RetentionSettings(
                setting.policy,
                setting.budget,
                "always",
                setting.stride,
                setting.prefill_stride,
                prompt_end=probe.prompt_end,
            )
            retention = own.resolve(KEEPS_ALL, block_size)
            assert retention is not None, "there is a policy and a budget"
            try:
                retention.check(len(probe.token_ids), block_size)
            except RequestError as error:
                raise ConfigError(f"{setting}: {error}") from None


def _run(llm: LLM, meter: Meter, task: Task, probes: Sequence[Probe], setting: Setting, advance: Advance) -> Outcome:
    meter.reset()
    started = time.perf_counter()
    outputs = run_probes(llm, probes, setting.params, lambda: advance(setting))
    seconds = time.perf_counter() - started
    held, block = meter.read(), llm.stats().bytes_per_block
    blocks = held.answering if task.counts_answers else held.reading
    choices = [output.outputs[0] for output in outputs]
    num_kept = sum(choice.num_kept for choice in choices)
    return Outcome(
        setting=setting,
        grade=task.grade(outputs),
        retained_bytes=None if blocks is None else blocks * block,
        peak_bytes=held.peak * block,
        kept=num_kept / (num_kept + sum(choice.num_evicted for choice in choices)),
        seconds=seconds,
    )


def run_probes(
    llm: LLM, probes: Sequence[Probe], retention: dict[str, Any], advance: Callable[[], None] = lambda: None
) -> list[RequestOutput]:
    """The outputs of all probes, in their order. `retention` are the fields of `SamplingParams` that say what is kept.
    Raises EngineError for a request that fails."""
    engine = llm.engine
    for i, probe in enumerate(probes):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=probe.max_tokens,
            stop_token_ids=probe.stop_token_ids,
            prompt_logprobs=0 if probe.is_scored else None,
            **retention | ({"kv_prompt_end": probe.prompt_end} if retention else {}),
        )
        engine.add_request(str(i), probe.token_ids, params, output_kind="final")
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error is not None:
                raise EngineError(f"text {output.request_id} of {len(probes)} failed: {output.error}")
            outputs[output.request_id] = output
            advance()
    return [outputs[str(i)] for i in range(len(probes))]
