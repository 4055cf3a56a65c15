"""P10: preemption by recompute or by swap, of whole requests; which of the two is computed, not assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.driving import Driver, tokens
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.sequence import Status


def tight(preemption: str, costs: PreemptionCosts | None = None) -> Driver:
    driver = Driver(
        num_blocks=30, block_size=4, num_host_blocks=30, preemption=preemption, costs=costs, max_num_batched_tokens=64
    )
    for i in range(6):
        driver.add(tokens(12, i), 30, n=1 + i % 3, temperature=1.0)
    return driver


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_leaves_and_returns_with_all_its_choices(preemption: str) -> None:
    driver = tight(preemption)
    seen = set()
    while driver.scheduler.num_unfinished:
        driver.step()
        for request in driver.requests:
            seen.add(request.status)
            lanes = request.lanes
            if request.status is Status.RUNNING:
                assert len(lanes) == len(request.unfinished) - len(request.unforked)
                assert not driver.memory.on_host[lanes].any()
            elif request.status is Status.SWAPPED:
                assert len(lanes) == len(request.unfinished) > 0
                assert driver.memory.on_host[lanes].all()
            else:
                assert lanes == []
    assert (Status.SWAPPED if preemption == "swap" else Status.PREEMPTED) in seen
    driver.check_outputs()
    driver.check_idle()


def test_recompute_computes_again_and_swap_copies() -> None:
    roomy = Driver(num_blocks=200, block_size=4, max_num_batched_tokens=64)
    for request in tight("swap").requests:
        roomy.add(request.prompt_token_ids, 30, n=request.params.n, temperature=1.0)
    needed = roomy.run().counters.tokens_computed
    recompute, swap = tight("recompute").run(), tight("swap").run()
    assert recompute.counters.tokens_computed > needed
    assert recompute.memory.counters.blocks_swapped_out == 0
    assert swap.counters.tokens_computed == needed
    assert swap.memory.counters.blocks_swapped_out == swap.memory.counters.blocks_swapped_in > 0
    assert recompute.counters.preemptions_swap == swap.counters.preemptions_recompute == 0


LINK = PreemptionCosts(
    bytes_per_block=1000,
    block_size=4,
    link_bytes_per_second=1e6,
    flops_per_token=1.0,
    flops_per_token_pair=1.0,
    flops_per_second=40_000.0,
)


def test_the_choice_follows_the_break_even() -> None:
    # 500 us a token over the link; n tokens at 25 us and n (n + 1) / 2 pairs at 25 us: equal at 2 x 19 - 1 tokens.
    assert LINK.break_even_tokens() == pytest.approx(37)
    lengths = {"swap": [], "recompute": []}
    driver = Driver(
        num_blocks=24,
        block_size=4,
        num_host_blocks=24,
        preemption="auto",
        costs=LINK,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    for i in range(8):
        driver.add(tokens(10 + 2 * i, i), 40)
    while driver.scheduler.num_unfinished:
        before = {r: int(driver.memory.tokens.lengths[r.lanes[0]]) for r in driver.scheduler.running}
        driver.step()
        for request, length in before.items():
            if request.status is Status.SWAPPED:
                lengths["swap"].append(length)
            elif request.status is Status.PREEMPTED:
                lengths["recompute"].append(length)
    driver.check_outputs()
    # The last block of a sequence may be partly filled; it is copied whole all the same.
    assert min(lengths["swap"]) > LINK.break_even_tokens()
    assert max(lengths["recompute"]) <= LINK.break_even_tokens() + 2 * LINK.block_size


@pytest.mark.parametrize(("speed", "swaps"), [(1e12, True), (1.0, False)])
def test_a_fast_link_swaps_and_a_slow_one_recomputes(speed: float, swaps: bool) -> None:
    driver = tight("auto", replace(LINK, link_bytes_per_second=speed)).run()
    assert (driver.counters.preemptions_swap > 0) == swaps
    assert (driver.counters.preemptions_recompute > 0) == (not swaps)


def test_in_the_middle_of_a_prompt_there_is_nothing_worth_swapping() -> None:
    driver = Driver(
        num_blocks=17, block_size=4, num_host_blocks=17, preemption="swap", max_num_seqs=4, max_num_batched_tokens=5
    )
    driver.add(tokens(9, 0), 40)
    driver.run_until(lambda: driver.requests[0].sequences[0].num_output_tokens == 2)
    long = driver.add(tokens(50, 1), 4)
    driver.run_until(lambda: long.num_preemptions > 0)
    assert long.status is Status.PREEMPTED
    assert driver.counters.preemptions_swap == driver.counters.swap_fallbacks == 0
    driver.run()
