"""R16: to recompute, the tokens generated so far join the prompt and go through in one prefill; the output stays."""

from __future__ import annotations

import numpy as np

from tests.driving import Driver, Request, StepFailure, evict_scattered, tokens
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
    driver.run_until(lambda: victim.status is Status.PREEMPTED)
    return driver, victim


def come_back(driver: Driver, victim: Request) -> int:
    driver.run_until(lambda: victim.status is Status.RUNNING)
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
    driver.run_until(lambda: victim.status is Status.RUNNING)
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


def test_blocks_that_were_computed_with_the_dead_are_not_matched() -> None:
    """Another request has the same prompt and lost nothing: past the first death its blocks are not the victim's."""
    text = tokens(21, 1)
    driver = Driver(
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        evictor=lambda sequence, length: range(2, 10) if (sequence.request.index, length) == (0, 12) else (),
        fault=lambda plan, ran: StepFailure() if plan.step == 8 else None,
        keep_plans=True,
    )
    victim = driver.add(text, 30)  # its first chunk ends at 12
    driver.step()
    whole = driver.add(text, 30)
    driver.run_until(lambda: driver.counters.failed_steps == 1)
    assert victim.status is whole.status is Status.PREEMPTED
    driver.run_until(lambda: victim.status is Status.RUNNING)
    plan = driver.plans[-1]
    assert plan.past_live.tolist() == [12 - 8]
    assert plan.positions.tolist() == list(range(12, 24))
    driver.run()
    assert victim.sequences[0].died_at == dict.fromkeys(range(2, 10), 12)


def test_a_group_waits_until_all_its_answers_fit() -> None:
    """The choices go on after the fork, each by itself: to compute the shared prompt alone would be for nothing."""
    driver = Driver(num_blocks=36, block_size=4, enable_prefix_caching=False)
    driver.add(tokens(20, 0), 80)
    group = driver.add(tokens(22, 1), 36, n=3, temperature=1.0)
    driver.run_until(lambda: group.status is Status.PREEMPTED)
    driver.run_until(lambda: group.status is Status.RUNNING)
    needed = 5 + 3 * (-(-len(group.sequences[0].token_ids) // 4) - 5)
    assert driver.memory.num_available + len(driver.memory.table(group.lanes[0])) >= needed
    driver.run()
    assert group.num_preemptions == 1
