"""What the memory did, as a table for people."""

from __future__ import annotations

from rich.table import Table

from vtoken.base.units import format_bytes
from vtoken.engine.stats import EngineStats


def memory_table(stats: EngineStats) -> Table:
    """Rows of name, figure and what it means; figures are totals since the engine started unless they say otherwise."""
    usage, memory, scheduler = stats.usage, stats.memory, stats.scheduler
    table = Table("", "", "", title="What the memory did", title_justify="left", show_header=False, box=None)
    table.columns[0].style = "bold"
    table.columns[1].justify = "right"
    table.columns[2].style = "dim"

    def row(name: str, figure: int | str, meaning: str) -> None:
        table.add_row(name, f"{figure:,}" if isinstance(figure, int) else figure, meaning)

    row("pool", usage.num_blocks, f"blocks of {usage.block_size} tokens, {format_bytes(stats.kv_bytes)} in all")
    row("peak", scheduler.peak_held_blocks, f"blocks held at once; {memory.blocks_taken:,} were handed out in all")
    row("now", usage.held_blocks, f"blocks held; {usage.cached_blocks:,} cached for later, {usage.free_blocks:,} free")
    row(
        "prefix hits",
        memory.prefix_hit_tokens,
        f"tokens not computed again, {stats.prefix_hit_rate:.0%} of those asked for",
    )
    row("forks", memory.forks, "choices that started on the blocks of their prompt")
    row("copies on write", memory.blocks_copied_on_write, "blocks copied when choices began to differ")
    row("forgotten", memory.blocks_forgotten, "cached blocks given up for new ones")
    row("preemptions", scheduler.preemptions, _preempted(stats))
    if memory.tokens_evicted:
        row(
            "evicted",
            memory.tokens_evicted,
            f"tokens: {scheduler.tokens_evicted_at_places:,} at fixed places, "
            f"{scheduler.tokens_evicted_under_pressure:,} when blocks were short",
        )
        row("cells used again", memory.cells_reused, "tokens written where evicted ones had lain: no block, no copy")
        row("blocks returned", memory.blocks_reclaimed, _returned(stats))
    row("tokens computed", scheduler.tokens_computed, f"in {scheduler.steps:,} steps")
    # A figure of its own, no part of the one above: the last token of an answer is drawn and never computed.
    row("tokens drawn", scheduler.tokens_generated, "of the answers, all choices together")
    row("speed", f"{stats.tokens_per_second:.1f}", f"answer tokens a second, over {stats.busy_seconds:.1f} s of work")
    return table


def _returned(stats: EngineStats) -> str:
    memory, moved = stats.memory, stats.memory.tokens_relocated * stats.bytes_per_block // stats.usage.block_size
    return (
        f"by running sequences: {memory.blocks_reclaimed_dead:,} fully dead, {memory.blocks_reclaimed_packed:,} packed "
        f"by moving {memory.tokens_relocated:,} tokens ({format_bytes(moved)})"
    )


def _preempted(stats: EngineStats) -> str:
    counters = stats.scheduler
    text = (
        f"requests paused: {counters.preemptions_recompute:,} to compute again, {counters.preemptions_swap:,} swapped"
    )
    return text + (f"; swap space was full {counters.swap_fallbacks:,} times" if counters.swap_fallbacks else "")
