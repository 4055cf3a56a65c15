"""U06: random requests for long, with aborts and preemption: the books balance after every step and are empty at the
end."""

from __future__ import annotations

import random

import pytest

from tests.driving import Driver, evict_scattered, tokens
from vtoken.schedule.sequence import FinishReason


def soak(num_requests: int, *, prefix: bool, preemption: str, evicts: bool = False, seed: int = 0) -> Driver:
    rng = random.Random(seed)
    driver = Driver(
        num_blocks=60,
        block_size=8,
        num_host_blocks=30,
        preemption=preemption,
        enable_prefix_caching=prefix,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        vocab_size=200,
        eos=frozenset({3}),
        evictor=evict_scattered(16, 30) if evicts else None,
    )
    while len(driver.requests) < num_requests or driver.scheduler.num_unfinished:
        if len(driver.requests) < num_requests and driver.scheduler.num_waiting < 6:
            shared, own = rng.choice((0, 8, 20, 32)), rng.randint(1, 60)
            driver.add(
                tokens(shared, rng.randrange(4), vocab_size=200) + [rng.randrange(200) for _ in range(own)],
                rng.randint(1, 60),
                n=rng.randint(1, 3),
                temperature=float(rng.randrange(2)),
            )
        if rng.random() < 0.03:
            victim = rng.choice(driver.requests[-12:]).request_id
            driver.step(in_flight=lambda victim=victim: driver.scheduler.abort(victim))
        elif driver.scheduler.num_unfinished:
            driver.step()
    driver.check_outputs()
    driver.check_idle()
    counters = driver.counters
    assert counters.finished[FinishReason.ABORT] > num_requests // 50
    assert counters.preemptions > num_requests // 50
    assert counters.finished[FinishReason.ERROR] == 0
    return driver


def test_u06_a_short_soak() -> None:
    assert soak(80, prefix=True, preemption="swap").counters.preemptions_swap > 0
    soak(80, prefix=False, preemption="recompute", evicts=True)


@pytest.mark.slow
@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix", [False, True])
def test_u06_a_long_soak(prefix: bool, preemption: str, evicts: bool) -> None:
    soak(5000, prefix=prefix, preemption=preemption, evicts=evicts, seed=1)
