"""From what a user asked for to a benchmark that can run, or to one line that says why not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from vtoken.base.config import KVCopies
from vtoken.base.errors import ConfigError
from vtoken.base.registry import suggest
from vtoken.base.validation import shorten
from vtoken.bench.arms import ARMS
from vtoken.bench.config import BenchConfig, Place
from vtoken.bench.devices import find_device
from vtoken.bench.jobs import Workload
from vtoken.bench.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY
from vtoken.bench.shapes import find_shape
from vtoken.bench.stages import Arm, Setting, SimulatedStage, Stage, simulated_bytes
from vtoken.bench.traces import CountTokens, read_trace
from vtoken.bench.workloads import WORKLOADS, make_workload
from vtoken.policies.registry import resolve_policy

if TYPE_CHECKING:
    from vtoken.policies.base import Policy

ALL: Final = "all"
MOST_BLOCKS: Final = 2**31 - 1  # ids of blocks are int32
MOST_REQUESTS: Final = 1_000_000


@dataclass(frozen=True)
class Preset:
    """What is measured where the user leaves it open. `is_quick`: with fewer and shorter jobs."""

    workloads: tuple[str, ...]
    policies: tuple[str, ...]
    ratios: tuple[float, ...]
    block_sizes: tuple[int, ...]
    is_quick: bool
    sweeps: bool


# Scissorhands' own window, 400 queries, is longer than many of these texts: it would hardly ever decide.
FULL: Final = Preset(
    tuple(WORKLOADS), ("h2o", "random", "scissorhands:window=64"), (0.3, 0.5, 0.7), (16, 32, 48), False, True
)
QUICK: Final = Preset(tuple(WORKLOADS), ("h2o", "random"), (0.5,), (16,), True, True)
# A real model on a few cores makes some tens of tokens a second.
MODEL: Final = Preset(("chat", "reasoning"), ("h2o", "random"), (0.5, 0.7), (16,), True, False)
MODEL_QUICK: Final = Preset(("chat",), ("h2o",), (0.5,), (16,), True, False)


@dataclass(frozen=True)
class Asked:
    """What the user asked for; None or empty: the preset's. `model` puts `shape` and `device` out of use."""

    workloads: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()
    block_sizes: tuple[int, ...] = ()
    arms: tuple[str, ...] = ()
    copies: str = "ordered"
    shape: str = "llama-3.1-8b"
    device: str = "h100"
    model: str | None = None
    num_blocks: int | None = None
    trace: Path | None = None
    at_once: bool = False
    limit: int | None = None
    scale: float | None = None
    seed: int = 0
    sweeps: bool | None = None
    quick: bool = False


def configure(asked: Asked) -> BenchConfig:
    """Raises ConfigError, naming the setting, for what is unknown, out of range or could not run."""
    preset = (MODEL_QUICK if asked.quick else MODEL) if asked.model else (QUICK if asked.quick else FULL)
    policies = {name: _policy(name) for name in asked.policies or preset.policies}
    ratios = tuple(sorted({_ratio(ratio) for ratio in asked.ratios or preset.ratios}))
    block_sizes = tuple(dict.fromkeys(_block_size(size) for size in asked.block_sizes or preset.block_sizes))
    arms = _arms(asked.arms)
    if asked.num_blocks is not None and not 1 <= asked.num_blocks <= MOST_BLOCKS:
        raise ConfigError(
            f"pool: expected a number of blocks from 1 to {MOST_BLOCKS}, or auto, got {shorten(asked.num_blocks)}"
        )
    if asked.limit is not None and not 1 <= asked.limit <= MOST_REQUESTS:
        raise ConfigError(f"limit: expected a number of requests from 1 to {MOST_REQUESTS}, got {shorten(asked.limit)}")
    if not 0 <= asked.seed < 2**63:
        raise ConfigError(f"seed: expected a whole number from 0 to 2**63 - 1, got {shorten(asked.seed)}")
    copies = next((kind for kind in get_args(KVCopies) if kind == asked.copies), None)
    if copies is None:
        raise ConfigError(f"copies: expected ordered or beside, got {asked.copies!r}")
    place, longest, count_tokens = _place(asked)
    workloads = _workloads(asked, preset, count_tokens)
    for workload in workloads:
        if workload.longest > longest:
            raise ConfigError(
                f"workload: {workload.name} has a text of {workload.longest} tokens, but "
                f"{asked.model or asked.shape} has positions for {longest} only; give a smaller scale"
            )
    config = BenchConfig(
        place=place,
        workloads=workloads,
        policies=policies,
        ratios=ratios,
        block_sizes=block_sizes,
        arms=arms,
        copies=copies,
        num_blocks=asked.num_blocks,
        seed=asked.seed,
        sweeps=preset.sweeps if asked.sweeps is None else asked.sweeps,
        is_coarse=preset.is_quick,
        settings={
            "policies": ", ".join(policies),
            "ratios (share of a text that is erased)": ", ".join(f"{ratio:g}" for ratio in ratios),
            "block sizes": ", ".join(map(str, block_sizes)),
            "arms": ", ".join(arms),
            "copies": {"ordered": "ordered, before a step", "beside": "beside the steps"}[copies],
            "pool": "auto: five requests of mean length, or the longest"
            if asked.num_blocks is None
            else f"{asked.num_blocks} blocks",
            "trigger": "always: tokens die at fixed places, so victims do not depend on the load",
            "prefix cache": "off: no two prompts begin alike",
            "seed": asked.seed,
            "quick": asked.quick,
        },
    )
    config.check()
    return config


def _policy(spec: str) -> Policy:
    try:
        return resolve_policy(spec)
    except ConfigError as error:
        raise ConfigError(f"policy: {error}") from None


def _ratio(ratio: float) -> float:
    if not (isfinite(ratio) and 0 < ratio < 1):
        raise ConfigError(f"ratio: expected the share of a text to erase, above 0 and below 1, got {ratio:g}")
    if 1 - ratio == 1:
        raise ConfigError(f"ratio: {ratio:g} is too little to tell what is left from the whole text")
    return ratio


def _block_size(size: int) -> int:
    if not 4 <= size <= 256:
        raise ConfigError(f"block_size: expected a whole number of tokens from 4 to 256, got {shorten(size)}")
    return size


def _arms(names: tuple[str, ...]) -> tuple[Arm, ...]:
    for name in names:
        if name not in ARMS:
            raise ConfigError(f"arms: unknown arm {name!r}; {suggest(name, list(ARMS))}known: {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if not names or arm in names)


def _workloads(asked: Asked, preset: Preset, count_tokens: CountTokens | None) -> tuple[Workload, ...]:
    scale = asked.scale
    if scale is not None and not (isfinite(scale) and 0 < scale <= 100):
        raise ConfigError(f"scale: expected a factor above 0 and up to 100, got {scale:g}")
    if asked.trace is not None:
        if asked.workloads:
            raise ConfigError("workload: a trace is the workload; give one of the two")
        trace = read_trace(
            asked.trace,
            limit=asked.limit or WORKLOADS["chat"].num_jobs,
            scale=scale or 1.0,
            at_once=asked.at_once,
            count_tokens=count_tokens,
        )
        return (trace,)
    names = asked.workloads or preset.workloads
    if ALL in names:
        names = tuple(WORKLOADS)
    for name in names:
        if name not in WORKLOADS:
            known = [*WORKLOADS, ALL]
            raise ConfigError(f"workload: unknown {name!r}; {suggest(name, known)}known: {', '.join(known)}")
    workloads = []
    for name in dict.fromkeys(names):
        num_jobs, own_scale = WORKLOADS[name].quick if preset.is_quick else (WORKLOADS[name].num_jobs, 1.0)
        workloads.append(
            make_workload(name, seed=asked.seed, num_jobs=asked.limit or num_jobs, scale=scale or own_scale)
        )
    return tuple(workloads)


def _place(asked: Asked) -> tuple[Place, int, CountTokens | None]:
    """(where the arms run, the longest text there, how long a text is in tokens)"""
    if asked.model is None:
        shape, device = find_shape(asked.shape), find_device(asked.device)

        def simulate(setting: Setting) -> Stage:
            return SimulatedStage(setting, shape, device)

        about = {
            "model": f"{asked.shape} (its shape; no weights, tokens by hash)",
            "device": f"{asked.device}, simulated: {MEMORY_EFFICIENCY:.0%} of its bandwidth, "
            f"{COMPUTE_EFFICIENCY:.0%} of its FLOP/s",
            "attention": "heavy hitters, as uneven as SmolLM2-135M's",
        }
        return Place(simulate, about, simulated_bytes), shape.max_position_embeddings, None
    return _model_place(asked.model, with_tokenizer=asked.trace is not None)


def _model_place(model: str, *, with_tokenizer: bool) -> tuple[Place, int, CountTokens | None]:
    from vtoken.bench.engine_stage import EngineStage
    from vtoken.models.loader import read_limits
    from vtoken.models.resolve import resolve_model

    folder = resolve_model(model)
    limits = read_limits(folder)
    count_tokens: CountTokens | None = None
    if with_tokenizer:
        from vtoken.engine.text import Tokenizer

        tokenizer = Tokenizer.from_folder(folder, limits.vocab_size)

        def count(text: str) -> int:
            return len(tokenizer.encode(text))

        count_tokens = count
    about = {"model": model, "device": "this machine, by its own clock", "attention": "the model's, on random prompts"}
    return Place(partial(EngineStage, model=model), about), limits.max_position_embeddings, count_tokens
