"""X5: policy, budget and pinned ranges belong to a request: several kinds of them run beside each other."""

from __future__ import annotations

from typing import Any

from tests.driving import Driver, tokens

ALWAYS: dict[str, Any] = {"kv_trigger": "always", "kv_stride": 8, "kv_prefill_stride": 16}


def test_x05_each_request_keeps_what_it_asked_for() -> None:
    driver = Driver(num_blocks=200, block_size=8, max_num_batched_tokens=128)
    oldest_kept = driver.add(tokens(80, 1), 20, kv_policy="streaming_llm:sinks=4", kv_budget=24, **ALWAYS)
    larger = driver.add(tokens(80, 1), 20, kv_policy="streaming_llm:sinks=4", kv_budget=48, **ALWAYS)
    pinned = driver.add(tokens(80, 1), 20, kv_policy="streaming_llm:sinks=4", kv_budget=24, kv_pin=[(30, 36)], **ALWAYS)
    by_attention = driver.add(tokens(80, 1), 20, kv_policy="h2o:recent=4", kv_budget=24, **ALWAYS)
    whole = driver.add(tokens(80, 1), 20)
    driver.run()

    def kept(request: Any) -> list[int]:
        [sequence] = request.sequences
        return [p for p in range(96) if sequence.died_at.get(p, 99) > 96]

    assert kept(oldest_kept) == [*range(4), *range(76, 96)]
    assert kept(larger) == [*range(4), *range(52, 96)]
    assert kept(pinned) == [*range(4), *range(30, 36), *range(82, 96)]
    assert len(kept(by_attention)) == 24
    assert kept(by_attention) != kept(oldest_kept)
    assert kept(whole) == list(range(96))
