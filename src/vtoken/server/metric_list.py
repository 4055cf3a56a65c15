"""Every metric by name: what it means, and where the engine keeps it. `docs/metrics.md` is made from this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from vtoken.engine.stats import EngineStats
from vtoken.schedule.sequence import FinishReason


@dataclass(frozen=True)
class Moment:
    """What is told of an engine at once: its own numbers, and what can be seen from outside while a step runs."""

    stats: EngineStats
    is_alive: bool
    last_step_age: float  # seconds
    snapshot_age: float  # seconds since `stats` were taken
    num_refused: int


Value = int | float | Mapping[str, int | float]  # by the value of the label, where there is one


@dataclass(frozen=True)
class Metric:
    """A gauge or a counter. `name` is without prefix, a counter's also without `_total`."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    read: Callable[[Moment], Value]
    label: str | None = None
    in_vllm: bool = False  # same name, same meaning


@dataclass(frozen=True)
class Distribution:
    """A histogram, one value for each of what `meaning` names. Bounds are upper ones, included."""

    name: str
    meaning: str
    bounds: tuple[float, ...] | None  # None: 1, 2, 5, 10, ... up to max_model_len
    in_vllm: bool = True


def _gauge(name: str, meaning: str, read: Callable[[Moment], Value], label: str | None = None) -> Metric:
    return Metric(name, "gauge", meaning, read, label)


def _counter(name: str, meaning: str, read: Callable[[Moment], Value], label: str | None = None) -> Metric:
    return Metric(name, "counter", meaning, read, label)


def _vllm(metric: Metric) -> Metric:
    return replace(metric, in_vllm=True)


INFO_NAME = "cache_config_info"
INFO_MEANING = "The KV pool as labels; always 1. vLLM's names: num_gpu_blocks is the pool, num_cpu_blocks swap space."
INFO_LABELS = ("block_size", "num_gpu_blocks", "num_cpu_blocks")


def read_info(moment: Moment) -> tuple[str, ...]:
    """Values of INFO_LABELS."""
    stats = moment.stats
    return str(stats.usage.block_size), str(stats.usage.num_blocks), str(stats.num_host_blocks)


def _blocks(moment: Moment) -> Value:
    usage = moment.stats.usage
    return {
        "free": usage.free_blocks,
        "held": usage.held_blocks,
        "cached": usage.cached_blocks,
        "pinned": usage.pinned_blocks,
    }


def _cells(moment: Moment) -> Value:
    usage = moment.stats.usage
    size = usage.block_size
    return {
        "live": usage.live_tokens,
        "hole": usage.holes,
        "tail_slack": usage.tail_slack,
        "cached": usage.cached_blocks * size,
        "free": usage.free_blocks * size,
        "pinned": usage.pinned_blocks * size,
    }


def _host_blocks(moment: Moment) -> Value:
    free = moment.stats.free_host_blocks
    return {"free": free, "used": moment.stats.num_host_blocks - free}


def _sources(moment: Moment) -> Value:
    counters = moment.stats.scheduler
    cached = counters.prompt_tokens_cached
    return {"local_compute": counters.prompt_tokens - cached, "local_cache_hit": cached}


def _finished(moment: Moment) -> Value:
    return {reason.value: moment.stats.scheduler.finished[reason] for reason in FinishReason}


def _preemptions(moment: Moment) -> Value:
    counters = moment.stats.scheduler
    return {"recompute": counters.preemptions_recompute, "swap": counters.preemptions_swap}


def _evicted(moment: Moment) -> Value:
    counters = moment.stats.scheduler
    decided = {
        "place": counters.tokens_evicted_at_places,
        "pressure": counters.tokens_evicted_under_pressure,
        "caller": counters.tokens_evicted_by_caller,
    }
    return decided | {"replay": moment.stats.memory.tokens_evicted - sum(decided.values())}


def _climbs(moment: Moment) -> Value:
    counters = moment.stats.scheduler
    return {
        "forget": counters.forgets,
        "drain": counters.drains,
        "reclaim": counters.reclaims,
        "evict": counters.evictions,
        "preempt": counters.preemptions_under_pressure,
    }


def _ladder_blocks(moment: Moment) -> Value:
    counters, memory = moment.stats.scheduler, moment.stats.memory
    return {
        "forget": memory.blocks_forgotten,
        "drain": memory.blocks_drained,
        "reclaim": counters.blocks_by_reclaim,
        "evict": counters.blocks_by_eviction,
        "preempt": counters.blocks_by_preemption,
    }


def _reclaimed(moment: Moment) -> Value:
    memory = moment.stats.memory
    return {
        "dead": memory.blocks_reclaimed_dead,
        "packed": memory.blocks_reclaimed_packed,
        "trimmed": memory.blocks_trimmed,
    }


def _swapped(moment: Moment) -> Value:
    memory = moment.stats.memory
    return {"out": memory.blocks_swapped_out, "in": memory.blocks_swapped_in}


METRICS: tuple[Metric, ...] = (
    # Requests
    _vllm(_gauge("num_requests_running", "Requests that hold KV blocks and run.", lambda m: m.stats.num_running)),
    _vllm(
        _gauge(
            "num_requests_waiting",
            "Requests that wait: those that never ran, and those that were preempted.",
            lambda m: m.stats.num_waiting + m.stats.num_preempted,
        )
    ),
    _gauge(
        "num_requests_waiting_by_reason",
        "The same, by what they wait for: never ran and lack KV blocks, or a place among max_num_seqs, or just the "
        "next step; or had blocks, and were preempted (to be computed again) or swapped. vLLM has other reasons.",
        lambda m: {str(reason): count for reason, count in m.stats.waiting_by_reason.items()},
        "reason",
    ),
    _vllm(_counter("request_success", "Requests that have ended, by how; failures too.", _finished, "finished_reason")),
    _counter("requests_refused", "Requests refused because the queue was full (status 429).", lambda m: m.num_refused),
    _counter(
        "requests_given_up",
        "Requests that were admitted and could not go on: a fault of vtoken, please report it.",
        lambda m: m.stats.scheduler.given_up,
    ),
    # Tokens
    _vllm(
        _counter(
            "prompt_tokens",
            "Tokens of the prompts of requests that got their first token, cached ones too.",
            lambda m: m.stats.scheduler.prompt_tokens,
        )
    ),
    _vllm(_counter("prompt_tokens_by_source", "The same, by where their KV came from.", _sources, "source")),
    _vllm(_counter("generation_tokens", "Tokens drawn.", lambda m: m.stats.scheduler.tokens_generated)),
    _counter(
        "tokens_computed",
        "Tokens that went through the model: of prompts, of answers, and again after preemptions.",
        lambda m: m.stats.scheduler.tokens_computed,
    ),
    _vllm(
        _counter(
            "prefix_cache_queries",
            "Tokens of admitted texts that could have been in the prefix cache.",
            lambda m: m.stats.memory.prefix_query_tokens,
        )
    ),
    _vllm(_counter("prefix_cache_hits", "Tokens of them that were there.", lambda m: m.stats.memory.prefix_hit_tokens)),
    # Steps
    _counter("steps", "Steps that were begun.", lambda m: m.stats.scheduler.steps),
    _counter("failed_steps", "Steps that failed as a whole.", lambda m: m.stats.scheduler.failed_steps),
    _counter("busy_seconds", "Time spent in steps.", lambda m: m.stats.busy_seconds),
    _gauge("engine_alive", "1 while the engine takes requests, 0 when it is closed or has died.", lambda m: m.is_alive),
    _gauge(
        "last_step_age_seconds",
        "Time since a step ended, while there is work. If it grows, a step hangs.",
        lambda m: m.last_step_age,
    ),
    _gauge(
        "snapshot_age_seconds",
        "Age of what this page says of the engine; it grows while a long step runs.",
        lambda m: m.snapshot_age,
    ),
    # Memory
    _vllm(
        _gauge(
            "kv_cache_usage_perc",
            "Share of the KV pool that cannot be handed out now, 0 to 1; cached blocks can.",
            lambda m: m.stats.usage.used_fraction,
        )
    ),
    _gauge(
        "kv_blocks",
        "Blocks of the KV pool: free, held by sequences, cached only (forgotten when needed), or only pinned by a copy "
        "under way. Together they are the pool.",
        _blocks,
        "state",
    ),
    _gauge(
        "kv_cells",
        "The same in cells, one a token; in held blocks a cell is live (attention reads it), a hole (its token died) "
        "or tail slack (for tokens to come). Together they are the pool.",
        _cells,
        "state",
    ),
    _gauge("kv_blocks_shared", "Blocks held by more than one sequence.", lambda m: m.stats.usage.shared_blocks),
    _gauge(
        "kv_blocks_partly_used",
        "Held blocks with live cells and others.",
        lambda m: m.stats.usage.partly_used_blocks,
    ),
    _gauge(
        "kv_blocks_retained",
        "Blocks held by one sequence alone, over all sequences; beside kv_blocks_floor.",
        lambda m: m.stats.usage.retained_blocks,
    ),
    _gauge(
        "kv_blocks_floor",
        "Blocks that their live tokens would fill, each sequence's rounded up: the fewest that packing could leave.",
        lambda m: m.stats.usage.floor_blocks,
    ),
    _gauge(
        "kv_blocks_reserved",
        "Retained blocks without a token yet, held for tokens to come.",
        lambda m: m.stats.usage.reserved_blocks,
    ),
    _gauge("kv_blocks_held_peak", "The most blocks held at once so far.", lambda m: m.stats.scheduler.peak_held_blocks),
    _gauge("kv_host_blocks", "Blocks of swap space in host memory.", _host_blocks, "state"),
    _gauge("kv_block_bytes", "Bytes of a KV block in all layers.", lambda m: m.stats.bytes_per_block),
    _gauge("weight_bytes", "Bytes of the model's weights.", lambda m: m.stats.weight_bytes),
    # Eviction and the pressure ladder
    _counter(
        "tokens_evicted",
        "Tokens that died, by what decided it: a fixed place (kv_trigger=always), pressure, a caller of evict; replay: "
        "they had died before their sequence was preempted, and died again when it was computed again.",
        _evicted,
        "trigger",
    ),
    _counter(
        "ladder_climbs",
        "How often blocks were short and each rung of the pressure ladder was tried with success: forget cached "
        "blocks, drain (wait for copies), reclaim holes, evict tokens, preempt a request.",
        _climbs,
        "rung",
    ),
    _counter("ladder_blocks", "Blocks that each rung made available.", _ladder_blocks, "rung"),
    _vllm(
        _counter(
            "num_preemptions",
            "Preemptions, those of requests whose step failed too.",
            lambda m: m.stats.scheduler.preemptions,
        )
    ),
    _counter("preemptions_by_mode", "The same, by what becomes of the KV.", _preemptions, "mode"),
    _counter(
        "swap_fallbacks",
        "Preemptions that recompute because swap space was full.",
        lambda m: m.stats.scheduler.swap_fallbacks,
    ),
    _counter(
        "reclaim_decisions",
        "Decisions about winning blocks back: live tokens were packed, only dead blocks returned, no block could be "
        "won, or it would have cost too many copies.",
        lambda m: {str(verdict): count for verdict, count in m.stats.reclaim_decisions.items()},
        "verdict",
    ),
    _counter(
        "blocks_reclaimed",
        "Blocks that running sequences gave back: with no live token left, after packing, or held for tokens that did "
        "not come.",
        _reclaimed,
        "how",
    ),
    _counter(
        "cells_reused",
        "Tokens that were written where an evicted one had lain, which takes no block and no copy.",
        lambda m: m.stats.memory.cells_reused,
    ),
    _counter("tokens_relocated", "Live tokens that were packed.", lambda m: m.stats.memory.tokens_relocated),
    # Copies
    _counter("blocks_taken", "Blocks handed out.", lambda m: m.stats.memory.blocks_taken),
    _counter(
        "blocks_copied_on_write", "Shared blocks copied to be written.", lambda m: m.stats.memory.blocks_copied_on_write
    ),
    _counter("blocks_swapped", "Blocks moved to and from host memory.", _swapped, "direction"),
    _counter("sequence_forks", "Sequences begun over the blocks of another one.", lambda m: m.stats.memory.forks),
    _counter(
        "copies",
        "Copies of KV that were done.",
        lambda m: {kind.value: count for kind, count in m.stats.copies.num_copies.items()},
        "kind",
    ),
    _counter(
        "copied_bytes",
        "Bytes of KV they wrote; those of packing are relocate.",
        lambda m: {kind.value: count for kind, count in m.stats.copies.bytes_copied.items()},
        "kind",
    ),
    _counter(
        "copy_wait_seconds",
        "How long steps waited for copies: all of an ordered one, the start of one beside the steps.",
        lambda m: m.stats.copies.seconds_waited,
    ),
    _gauge("copies_pending", "Copies beside the steps that have not ended.", lambda m: m.stats.num_copies_pending),
)

_TOKEN_GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST_TOKENS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PHASES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

DISTRIBUTIONS: tuple[Distribution, ...] = (
    Distribution(
        "time_to_first_token_seconds",
        "For each request: from its arrival to its first token.",
        (*_FIRST_TOKENS, 640, 2560),
    ),
    Distribution(
        "inter_token_latency_seconds",
        "For each token of a choice but its first: the time since the one before it, preemptions included. Beams, "
        "which take over from each other, have none.",
        _TOKEN_GAPS,
    ),
    Distribution(
        "request_time_per_output_token_seconds",
        "For each request that ended by itself: its decode time a token, the first aside.",
        _TOKEN_GAPS,
    ),
    Distribution(
        "e2e_request_latency_seconds",
        "For each request that ended by itself, not by abort or error: from its arrival to its end.",
        _PHASES,
    ),
    Distribution("request_queue_time_seconds", "For each request that ran: until it first ran.", _PHASES),
    Distribution(
        "request_prefill_time_seconds", "For each request with a token: from when it first ran to that one.", _PHASES
    ),
    Distribution(
        "request_decode_time_seconds", "For each request with a token: from its first to its last one.", _PHASES
    ),
    Distribution("request_inference_time_seconds", "For each request with a token: the two together.", _PHASES),
    Distribution("request_prompt_tokens", "For each request that ended by itself: tokens of its prompt.", None),
    Distribution(
        "request_prefill_kv_computed_tokens",
        "For each request that ended by itself: tokens of its prompt that the prefix cache did not have.",
        None,
    ),
    Distribution(
        "request_generation_tokens",
        "For each request that ended by itself: tokens of its answer, all choices together.",
        None,
    ),
    Distribution(
        "request_max_num_generation_tokens",
        "For each request that ended by itself: tokens of its longest choice.",
        None,
    ),
    Distribution("request_params_n", "For each request that ended by itself: n.", (1, 2, 5, 10, 20)),
    Distribution(
        "request_params_max_tokens", "For each request that ended by itself: max_tokens, or the room it had.", None
    ),
    Distribution(
        "request_evicted_tokens",
        "For each request that ended by itself: tokens that died, all choices together.",
        None,
        in_vllm=False,
    ),
    Distribution(
        "iteration_tokens_total",
        "For each step that computed any: tokens that went through the model.",
        (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    ),
)


def bounds_up_to(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `most`."""
    bounds = (mantissa * 10**exponent for exponent in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)
