"""Swap or recompute: what each would cost, from measured speeds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreemptionCosts:
    """Speeds of a machine and needs of a model, for the choice that `preemption="auto"` makes.

    Recomputing grows faster than the text (each token attends to all before it), swapping does not: so there is a
    length from which swapping is the cheaper one.
    """

    bytes_per_block: int
    block_size: int
    link_bytes_per_second: float  # between device and host memory, one way
    flops_per_token: float  # linear layers
    flops_per_token_pair: float  # attention of one token to one other, all layers and heads
    flops_per_second: float

    def swap_seconds(self, num_blocks: int) -> float:
        """Out and in again."""
        return 2 * num_blocks * self.bytes_per_block / self.link_bytes_per_second

    def recompute_seconds(self, num_tokens: int) -> float:
        """One prefill of `num_tokens` tokens."""
        pairs = num_tokens * (num_tokens + 1) / 2
        return (num_tokens * self.flops_per_token + pairs * self.flops_per_token_pair) / self.flops_per_second

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        return self.swap_seconds(num_blocks) < self.recompute_seconds(num_tokens)

    def break_even_tokens(self) -> float:
        """The length from which a lone sequence is swapped (partly filled blocks aside); infinite if never."""
        swap_per_token = 2 * self.bytes_per_block / self.block_size / self.link_bytes_per_second
        # swap_per_token * n = (n * a + n * (n + 1) / 2 * b) / speed, solved for n
        surplus = swap_per_token * self.flops_per_second - self.flops_per_token
        if surplus <= 0:
            return 0.0
        if self.flops_per_token_pair == 0:
            return float("inf")
        return max(0.0, 2 * surplus / self.flops_per_token_pair - 1)
