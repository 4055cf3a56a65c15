"""What a server says when it starts: what it holds, in plain words."""

from __future__ import annotations

from vtoken.base.units import format_bytes
from vtoken.engine.engine import Engine
from vtoken.schedule.retention import KEEPS_ALL

_LENGTHS = (256, 1024, 4096, 16384, 65536)  # of contexts to count users for, below the longest


def summary(engine: Engine) -> list[str]:
    """Lines on weights, KV pool, and how many users fit with contexts of what length."""
    facts, scheduler = engine.facts, engine.scheduler
    capacity, config = scheduler.capacity, scheduler.config
    pool = capacity.num_blocks * facts.bytes_per_block
    tokens = capacity.num_blocks * capacity.block_size
    retention = KEEPS_ALL.resolve(config.retention, capacity.block_size) if config.kv_mode != "native" else None
    lines = [
        f"weights: {format_bytes(facts.weight_bytes)}",
        f"KV pool: {format_bytes(pool)}, {capacity.num_blocks:,} blocks of {capacity.block_size} tokens: {tokens:,} "
        f"tokens, {format_bytes(facts.bytes_per_block // capacity.block_size)} each",
    ]
    if retention is not None:
        lines.append(f"eviction: {retention.policy.name}, budget {retention.budget}, trigger {retention.trigger}")
    users = []
    for length in [*(length for length in _LENGTHS if length < config.max_model_len), config.max_model_len]:
        # The last token of an answer is never computed, so it needs no cell.
        blocks = capacity.blocks_for_request(max(1, length // 2), max(1, length - length // 2), 1, retention)
        users.append(f"{min(capacity.num_blocks // blocks, config.max_num_seqs):,} of {length:,}")
    lines.append(
        f"room at once, if no prompts are shared, for so many users of so many tokens each: {', or '.join(users)}"
    )
    return lines
