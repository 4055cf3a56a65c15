"""Swap or recompute: the choice is the cheaper of two costs, and the break-even is where they are equal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vtoken.schedule.preemption import PreemptionCosts

# Llama-3.1-8B on an H100: 131,072 bytes a token, 16 GFLOPs a token, attention 4 x 32 layers x 4,096 a pair.
H100 = PreemptionCosts(
    bytes_per_block=16 * 131_072,
    block_size=16,
    link_bytes_per_second=25e9,
    flops_per_token=16e9,
    flops_per_token_pair=4 * 32 * 4096,
    flops_per_second=400e12,
)
rates = st.floats(1e-3, 1e6)
costs = st.builds(PreemptionCosts, st.integers(1, 10**9), st.sampled_from([4, 16, 256]), rates, rates, rates, rates)


def test_costs_are_bytes_over_the_link_and_flops_over_the_speed() -> None:
    assert H100.swap_seconds(100) == pytest.approx(2 * 100 * 16 * 131_072 / 25e9)
    assert H100.recompute_seconds(1) == pytest.approx((16e9 + 4 * 32 * 4096) / 400e12)
    assert H100.recompute_seconds(1000) == pytest.approx((1000 * 16e9 + 500_500 * 4 * 32 * 4096) / 400e12)


def test_a_slow_link_swaps_from_some_length_on() -> None:
    assert H100.break_even_tokens() == 0  # 10.5 microseconds a token over the link, 40 through the model
    slow = replace(H100, link_bytes_per_second=5e9)
    # 52.4 us a token over the link, 40 us of layers: attention has to cost 12.4 us, n = 2 x 12.4e-6 x 400e12 / 524,288
    assert slow.break_even_tokens() == pytest.approx(18_970, rel=0.01)
    assert not slow.prefers_swap(16_000, 1_000)
    assert slow.prefers_swap(20_000, 1_250)


def test_without_attention_a_link_slower_than_the_model_never_pays() -> None:
    never = replace(H100, link_bytes_per_second=5e9, flops_per_token_pair=0)
    assert never.break_even_tokens() == math.inf
    assert not never.prefers_swap(16 * 10**6, 10**6)


@given(costs=costs, num_blocks=st.integers(1, 10**6))
def test_the_break_even_is_where_the_comparison_turns(costs: PreemptionCosts, num_blocks: int) -> None:
    num_tokens = num_blocks * costs.block_size
    # Where both cost the same within rounding, either choice is right.
    swap, recompute = costs.swap_seconds(num_blocks), costs.recompute_seconds(num_tokens)
    assume(not math.isclose(swap, recompute, rel_tol=1e-9))
    assert costs.prefers_swap(num_tokens, num_blocks) == (swap < recompute) == (num_tokens > costs.break_even_tokens())


@given(costs=costs)
def test_at_the_break_even_both_cost_the_same(costs: PreemptionCosts) -> None:
    tokens = costs.break_even_tokens()
    assume(tokens > 0)
    per_token = costs.swap_seconds(1) / costs.block_size
    assert costs.recompute_seconds(tokens) == pytest.approx(tokens * per_token, rel=1e-6)  # type: ignore[arg-type]
