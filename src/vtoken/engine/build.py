"""From settings to a running engine: load the model, size the pool, wire the parts."""

from __future__ import annotations

import logging

import torch

from vtoken.attention.registry import BACKENDS
from vtoken.base.clock import Clock
from vtoken.base.config import EngineConfig
from vtoken.base.errors import ConfigError
from vtoken.base.registry import suggest
from vtoken.base.units import format_bytes
from vtoken.engine.engine import Engine, EngineFacts
from vtoken.engine.precheck import default_retention
from vtoken.engine.text import Tokenizer
from vtoken.executor.local import LocalExecutor
from vtoken.kernels.compiler import KernelsUnavailable
from vtoken.kernels.library import library
from vtoken.linear.choose import choose
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.models.base import CausalLM
from vtoken.models.kernels import BATCH_INVARIANT, COMPILED
from vtoken.models.loader import load_model, resolve_model
from vtoken.models.prepare import prepare_linears
from vtoken.planner.kv_memory import KVShape, plan_kv
from vtoken.policies.statistics import Statistic
from vtoken.schedule.capacity import longest_sequence
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.retention import KEEPS_ALL, RetentionSettings
from vtoken.schedule.scheduler import Scheduler

logger = logging.getLogger("vtoken.engine")  # a name of its own: the server says the same in more words


def build_engine(config: EngineConfig, clock: Clock) -> Engine:
    """Start an engine. Raises ConfigError or CheckpointError before anything large is taken, where that can be told."""
    # What a user mistyped, or what cannot run here, should not wait for the weights.
    backend = _attention_backend(config.attention_backend)
    choose((), override=config.linear_backend, quantization=config.quantization)
    retention = _retention(config, BACKENDS[backend].statistics)
    folder = resolve_model(config.model)
    kernels = COMPILED if BACKENDS[backend].compiled else BATCH_INVARIANT
    model = load_model(folder, config.dtype, kernels)
    spec = model.spec
    _check_statistics(retention, model)
    # Left to itself the reference backend keeps every row apart, linears included.
    if BACKENDS[backend].compiled or (config.linear_backend, config.quantization) != ("auto", None):
        linears = prepare_linears(model, backend=config.linear_backend, quantization=config.quantization)
        for line in linears.summary():
            logger.debug("%s", line)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = Tokenizer.from_folder(config.tokenizer or folder, spec.vocab_size)
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, *_kv_formats(config, model.dtype))
    lone = KEEPS_ALL.resolve(retention, config.block_size) if config.kv_mode != "native" else None
    sizes = plan_kv(
        config,
        shape,
        spec.max_position_embeddings,
        longest=lambda num_blocks, block_size: longest_sequence(num_blocks, block_size, lone, config.kv_mode),
    )
    executor = LocalExecutor(
        model,
        num_blocks=sizes.num_blocks,
        block_size=config.block_size,
        num_host_blocks=sizes.num_host_blocks,
        attention_backend=backend,
        kv_shape=shape,
    )
    if config.prefault_kv:
        executor.store.prefault()
    memory = KVCacheManager(
        sizes.num_blocks,
        config.block_size,
        num_host_blocks=sizes.num_host_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        reuse_cells=config.kv_mode in ("native", "vtoken"),
    )
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        preemption=config.preemption,
        eos_token_ids=spec.eos_token_ids | _own_eos(tokenizer),
        retention=retention,
        kv_mode=config.kv_mode,
        kv_copies=config.kv_copies,
        on_pressure=config.on_pressure,
        admission_evicts=config.admission_evicts,
        rope_lengths=spec.rope_lengths,
    )
    block_bytes = shape.bytes_per_block(config.block_size)
    costs = _measure_costs(model, executor, block_bytes, config.block_size) if config.preemption == "auto" else None
    # A window is measured in positions, whatever the backend.
    needs_positions = executor.backend.needs_row_positions or any(layer.window for layer in spec.layers)
    scheduler = Scheduler(
        limits,
        memory,
        clock,
        costs=costs,
        row_positions=needs_positions,
        statistics=executor.backend.statistics - model.missing_statistics,
    )
    if tokenizer is not None:
        tokenizer.max_tokens = sizes.max_model_len
    facts = EngineFacts(
        spec.vocab_size,
        spec.bos_token_id,
        block_bytes,
        model.num_weight_bytes,
        min(config.max_logprobs, spec.vocab_size),
    )
    logger.info(
        "%s: weights %s, KV pool %s = %d blocks of %d tokens, sequences up to %d tokens",
        spec.architecture,
        format_bytes(facts.weight_bytes),
        format_bytes(sizes.num_blocks * block_bytes),
        sizes.num_blocks,
        config.block_size,
        sizes.max_model_len,
    )
    return Engine(scheduler, executor, facts, tokenizer=tokenizer, seed=config.seed, clock=clock)


def _attention_backend(name: str) -> str:
    """The backend that "auto" means on this machine; any other name is checked for being able to run on it."""
    if name != "auto" and name not in BACKENDS:
        known = sorted({"auto", *BACKENDS})
        raise ConfigError(f"unknown attention_backend {name!r}; {suggest(name, known)}known: {', '.join(known)}")
    if name != "auto" and not BACKENDS[name].compiled:
        return name
    try:
        library()
    except KernelsUnavailable as error:
        if name != "auto":
            raise ConfigError(f"attention_backend={name!r} cannot run here: {error}; use 'reference'") from error
        logger.warning("no compiled kernels, so everything is computed by the slow reference path: %s", error)
        return "reference"
    return "cpu" if name == "auto" else name


def _retention(config: EngineConfig, statistics: frozenset[type[Statistic]]) -> RetentionSettings:
    """See `default_retention`; and no policy that this attention backend does not tell what it needs."""
    settings = default_retention(config)
    policy = settings.policy
    if policy is None:
        return settings
    for need in policy.needs:
        if type(need) not in statistics:
            raise ConfigError(
                f"kv_policy={policy.name!r} needs {need.name}, which attention_backend="
                f"{config.attention_backend!r} does not give"
            )
    return settings


def _check_statistics(retention: RetentionSettings, model: CausalLM) -> None:
    """What the backend gives is checked before the weights are read; what the model lacks can be told only now."""
    policy = retention.policy
    if policy is None:
        return
    for need in policy.needs:
        if type(need) in model.missing_statistics:
            raise ConfigError(
                f"kv_policy={policy.name!r} needs {need.name}, which cannot be had of {model.spec.architecture} as it "
                "is served here; take another policy"
            )


def _kv_formats(config: EngineConfig, dtype: torch.dtype) -> tuple[str, str]:
    """Names of the formats of keys and values."""
    chosen = (config.key_cache_dtype or config.kv_cache_dtype, config.value_cache_dtype or config.kv_cache_dtype)
    keys, values = (str(dtype).removeprefix("torch.") if name == "auto" else name for name in chosen)
    return keys, values


def _own_eos(tokenizer: Tokenizer | None) -> set[int]:
    """A model may be trained to end its answers with a token that only its tokenizer declares."""
    return set() if tokenizer is None or tokenizer.eos_token_id is None else {tokenizer.eos_token_id}


def _measure_costs(model: CausalLM, executor: LocalExecutor, block_bytes: int, block_size: int) -> PreemptionCosts:
    measured, spec = executor.measure_costs(), model.spec
    return PreemptionCosts(
        bytes_per_block=block_bytes,
        block_size=block_size,
        link_bytes_per_second=measured.copy_bytes_per_s,
        flops_per_token=model.flops_per_token,
        flops_per_token_pair=4 * spec.num_layers * spec.num_heads * spec.head_dim,
        flops_per_second=measured.flops_per_s,
    )
