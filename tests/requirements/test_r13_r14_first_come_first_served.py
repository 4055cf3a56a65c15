"""R13-R14: first come first served; the latest is preempted first, with all its sequences; nobody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.driving import Driver, tokens
from vtoken.schedule.sequence import FinishReason, Status

PAUSED = (Status.PREEMPTED, Status.SWAPPED)

loads = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 3), st.integers(0, 6)), min_size=2, max_size=8
)


@settings(max_examples=30)
@given(
    load=loads,
    num_blocks=st.integers(12, 40),
    preemption=st.sampled_from(["recompute", "swap"]),
    prefix=st.booleans(),
)
def test_order_of_service(
    load: list[tuple[int, int, int, int]], num_blocks: int, preemption: str, prefix: bool
) -> None:
    driver = Driver(
        num_blocks=num_blocks,
        block_size=4,
        num_host_blocks=num_blocks,
        preemption=preemption,
        enable_prefix_caching=prefix,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_passes=0,
    )
    pending = list(load)
    while pending or driver.scheduler.num_unfinished:
        while pending and pending[0][3] <= driver.counters.steps:
            prompt, max_tokens, n, _ = pending.pop(0)
            needed = driver.scheduler.capacity.blocks_for_request(prompt, max_tokens, n)
            if needed <= num_blocks:
                driver.add(tokens(prompt, len(driver.requests)), max_tokens, n=n)
        if not driver.scheduler.num_unfinished:
            pending = [(prompt, max_tokens, n, 0) for prompt, max_tokens, n, _ in pending]
            continue
        before = {request: request.status for request in driver.requests}
        driver.step()
        ran = [request for request, status in before.items() if status is Status.RUNNING]
        victims = [request for request in ran if request.status in PAUSED]
        for victim in victims:
            # Whoever ran and came later had to go before it.
            assert all(r.status is not Status.RUNNING for r in ran if r.index > victim.index)
            assert all(s.lane is None or driver.memory.on_host[s.lane] for s in victim.sequences)
        if ran:
            assert ran[0].status in (Status.RUNNING, Status.FINISHED)  # the oldest is never preempted
        admitted = [r for r, status in before.items() if status is Status.WAITING and r.status is not Status.WAITING]
        for request in admitted:
            assert all(r.status is not Status.WAITING for r in driver.requests if r.index < request.index)
        back = [r for r, status in before.items() if status in PAUSED and r.status not in PAUSED]
        for request in back:
            assert not any(r.status in PAUSED and r.index < request.index for r in driver.requests)
        assert driver.counters.steps <= 5 * driver.solo_steps() + 20
    driver.check_outputs()
    driver.check_idle()
    assert driver.counters.finished[FinishReason.LENGTH] == len(driver.requests)


def test_a_request_is_not_overtaken_for_ever() -> None:
    """A big request among an endless stream of small ones that would always fit beside it."""
    driver = Driver(num_blocks=16, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
    for i in range(4):
        driver.add(tokens(8, i), 12)
    driver.step()
    big = driver.add(tokens(50, 9), 10)
    while not big.sequences[0].is_finished:
        while driver.scheduler.num_waiting < 3:
            driver.add(tokens(8, 10 + len(driver.requests)), 12)
        driver.step()
        assert driver.counters.steps < 200, "the big one starves"
    assert big.num_passes <= driver.max_passes
    driver.run()
