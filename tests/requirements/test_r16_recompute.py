"""R16: to recompute, the tokens generated so far join the prompt and go through in one prefill; the output stays."""

from __future__ import annotations

import numpy as np

from tests.driving import Driver, Request, evict_scattered, tokens
from vtoken.schedule.sequence import Status


def preempted_once(**settings: object) -> tuple[Driver, Request]:
    """A driver at the moment at which its second request has just been preempted."""
    driver = Driver(
        **{
            "num_blocks": 20,
            "block_size": 4,
            "max_num_batched_tokens": 100,
            "enable_prefix_caching": False,
            "keep_plans": True,
            **settings,
        }
    )
    driver.add(tokens(20, 0), 50)
    victim = driver.add(tokens(21, 1), 40)
    while victim.status is not Status.PREEMPTED:
        driver.step()
    return driver, victim


def come_back(driver: Driver, victim: Request) -> int:
    while victim.status is Status.PREEMPTED:
        driver.step()
    plan = driver.plans[-1]
    s = plan.lanes.tolist().index(victim.lanes[0])
    chunk = slice(plan.starts[s], plan.starts[s + 1])
    assert plan.past_live[s] == 0
    assert plan.positions[chunk].tolist() == list(range(plan.starts[s + 1] - plan.starts[s]))
    return int(np.diff(plan.starts)[s])


def test_prompt_and_answer_go_through_in_one_prefill() -> None:
    driver, victim = preempted_once()
    known = len(victim.sequences[0].token_ids)
    assert known > 21
    assert come_back(driver, victim) == known
    assert victim.sequences[0].num_output_tokens == known - 21 + 1
    driver.run()
    assert victim.num_preemptions == 1


def test_cached_blocks_need_no_computing() -> None:
    driver, victim = preempted_once(enable_prefix_caching=True)
    known = len(victim.sequences[0].token_ids)
    computed = driver.counters.tokens_computed
    while victim.status is Status.PREEMPTED:
        driver.step()
    plan = driver.plans[-1]
    s = plan.lanes.tolist().index(victim.lanes[0])
    assert plan.past_live[s] % 4 == 0
    assert plan.past_live[s] + np.diff(plan.starts)[s] == known
    assert driver.counters.tokens_computed > computed
    driver.run()


def test_deaths_are_replayed_where_they_were_and_nobody_is_asked_again() -> None:
    asked = []
    evict = evict_scattered(1000, 50)

    def evictor(sequence, length):
        positions = evict(sequence, length) if sequence.request.index == 1 else []
        asked.extend([(sequence.request.index, length)] * bool(positions))
        return positions

    driver, victim = preempted_once(evictor=evictor, num_blocks=16)
    deaths = driver.deaths_of(victim.sequences[0])
    assert set(deaths.values()) == {21}  # at the end of the prompt
    assert victim.sequences[0].died_at == deaths
    known = len(victim.sequences[0].token_ids)
    assert come_back(driver, victim) == 21  # the chunk is cut where the deaths are
    driver.step()
    plan = driver.plans[-1]
    s = plan.lanes.tolist().index(victim.lanes[0])
    assert plan.past_live[s] == 21 - len(deaths)
    assert np.diff(plan.starts)[s] == known - 21
    driver.run()
    assert asked == [(1, 21)]
    assert victim.sequences[0].died_at == deaths
