"""Limits a scheduler keeps to, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vtoken.base.config import KVCopies, KVMode, OnPressure, Preemption
from vtoken.base.errors import ConfigError
from vtoken.base.rope_lengths import RopeLengths
from vtoken.schedule.retention import KEEPS_ALL, RetentionSettings
from vtoken.schedule.sequence import FinishReason


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of a request, and what is done when blocks are short.

    `max_passes`: how many later requests may be admitted past one that waits at the head of the queue for memory.
    `kv_mode` and what follows are those of `EngineConfig`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    preemption: Preemption = "recompute"
    eos_token_ids: frozenset[int] = frozenset()
    max_passes: int = 16
    retention: RetentionSettings = KEEPS_ALL  # of requests that say nothing of it
    kv_mode: KVMode = "vtoken"
    kv_copies: KVCopies = "ordered"
    on_pressure: OnPressure = "evict"
    admission_evicts: bool = True
    rope_lengths: RopeLengths | None = None  # the model's, where its keys depend on how long a text can become

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}, but "
                "each running sequence needs a token of the step"
            )


@dataclass
class SchedulerCounters:
    """Totals since the start; they only grow."""

    steps: int = 0
    failed_steps: int = 0
    given_up: int = 0  # requests that were admitted and could not go on: bugs of ours; each ended with an error
    prompt_tokens: int = 0  # of the prompts of requests that have got their first token
    prompt_tokens_cached: int = 0  # of those: found in the prefix cache
    tokens_computed: int = 0  # prompt, answer and recomputed tokens that went through the model
    tokens_generated: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    swap_fallbacks: int = 0  # swaps that became recomputes because the host pool was full
    peak_held_blocks: int = 0
    # The rungs of the pressure ladder, how often each was climbed; blocks that free ones could give are rung 1.
    forgets: int = 0  # 2. cached blocks were forgotten
    drains: int = 0  # 3. waited a step for copies that were about to end
    reclaims: int = 0  # 4. holes that were there gave blocks back
    evictions: int = 0  # 5. tokens died so that blocks came back
    preemptions_under_pressure: int = 0  # 6. requests were sent away; the other preemptions undo failed steps
    # Blocks that could be handed out again after a rung; `MemoryCounters` has those of 2 and 3.
    blocks_by_reclaim: int = 0
    blocks_by_eviction: int = 0
    blocks_by_preemption: int = 0
    # Deaths by who decided them. What dies again, because its text is computed again, is in none of these.
    tokens_evicted_at_places: int = 0  # by `kv_trigger="always"`, without any pressure
    tokens_evicted_under_pressure: int = 0
    tokens_evicted_by_caller: int = 0  # by `Scheduler.evict`
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))  # requests

    def copy(self) -> SchedulerCounters:
        return replace(self, finished=self.finished.copy())

    @property
    def preemptions(self) -> int:
        return self.preemptions_recompute + self.preemptions_swap
