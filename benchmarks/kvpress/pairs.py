"""Which press stands beside which policy, with the same parameters where both have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

SINKS: Final = 4  # that both sides protect in streaming_llm, lagkv and expected_attention by default


@dataclass(frozen=True)
class Pair:
    """A press by class name, with what it is made with, and our policy as `resolve_policy` takes it."""

    press: str
    policy: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def policy_for(self, context: int) -> str:
        """The policy for contexts of so many tokens."""
        return self.policy.format(queries=context - SINKS)


PAIRS: Final = (
    Pair("RandomPress", "random", {"seed": 0}),
    Pair("StreamingLLMPress", "streaming_llm", {"n_sink": SINKS}),
    Pair("KnormPress", "knorm"),
    Pair("KeyDiffPress", "keydiff"),
    Pair("LagKVPress", "lagkv:lag=128", {"lag_size": 128, "n_sink": SINKS}),
    Pair("ObservedAttentionPress", "h2o"),
    Pair("TOVAPress", "tova"),
    Pair("SnapKVPress", "snapkv:window=64,kernel=5", {"window_size": 64, "kernel_size": 5}),
    # There it takes the queries of all tokens but the first four for what queries are like.
    Pair(
        "ExpectedAttentionPress",
        "expected_attention:horizon=512,window={queries}",
        {"n_future_positions": 512, "n_sink": SINKS},
    ),
)


def compression_ratio(context: int, kept: int) -> float:
    """The ratio at which kvpress keeps exactly `kept` of `context` tokens: it rounds `context * (1 - ratio)` down."""
    return 1 - (kept + 0.5) / context
