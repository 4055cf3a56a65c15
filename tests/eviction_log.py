"""Runs under eviction whose decision log is worth reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tests.driving import Driver, tokens
from vtoken.memory.decisions import ReclaimEvent


def shrinking_driver(
    policy: str, budget: int, prompts: Iterable[int], *, beside_delay: int | None = None, **settings: Any
) -> Driver:
    """Requests that lose tokens at fixed places of their texts, so that blocks are packed again and again. Copies run
    beside the steps, and take so many, unless `beside_delay` is None."""
    kv = {"kv_copies": "ordered" if beside_delay is None else "beside"}
    driver = Driver(
        num_blocks=120, block_size=4, max_num_batched_tokens=48, beside_delay=beside_delay or 0, kv=kv, **settings
    )
    for number, length in enumerate(prompts):
        driver.add(
            tokens(length, number),
            30,
            kv_policy=policy,
            kv_budget=budget,
            kv_trigger="always",
            kv_stride=8,
            kv_prefill_stride=16,
        )
    return driver


def phases_of(driver: Driver) -> dict[int, list[ReclaimEvent]]:
    """What happened to each decision, in order."""
    found: dict[int, list[ReclaimEvent]] = defaultdict(list)
    for event in driver.memory.decisions.events:
        found[event.decision].append(event)
    return found
