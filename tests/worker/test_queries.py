"""`QueryMemory`: the queries of a sequence's last tokens, whatever the steps in which they were computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.plans import Lane, Slice, make_plan, order
from tests.worker.fake_model import FakeModel
from vtoken.policies.statistics import FutureAttention, KeyNorm
from vtoken.schedule.plan import StepPlan
from vtoken.worker.queries import QueryMemory

SPEC = FakeModel(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16).spec
WIDTH = 2 * 16
WINDOW = FutureAttention(window=8)


def query(owner: int, position: int, layer: int) -> Tensor:
    return torch.arange(WIDTH) + 100.0 * layer + 1000.0 * position + 1e6 * owner


@dataclass(frozen=True)
class Part:
    """A slice: whose it is, in which lane, and its positions."""

    owner: int
    begin: int
    end: int
    lane: int = 0
    wants: Sequence[FutureAttention] = (WINDOW,)


@dataclass
class Driver:
    memory: QueryMemory = field(default_factory=lambda: QueryMemory(SPEC))

    def plan(self, parts: Sequence[Part]) -> StepPlan:
        slices = [Slice(Lane(4, list(range(40))), [0] * (p.end - p.begin), p.begin) for p in parts]
        orders = []
        for statistic in dict.fromkeys(each for p in parts for each in p.wants):
            some = [s for s, p in enumerate(parts) if statistic in p.wants]
            orders.append(order(statistic, some, owners=[parts[s].owner for s in some]))
        plan = make_plan(slices, statistics=[order(KeyNorm(), range(len(parts))), *orders])
        return replace(plan, lanes=torch.tensor([p.lane for p in parts], dtype=torch.int32).numpy())

    def step(self, *parts: Part, fails: bool = False) -> None:
        step = self.memory.begin(self.plan(parts))
        if step is None:
            return
        for layer in range(2):
            rows = [query(p.owner, position, layer) for p in parts for position in range(p.begin, p.end)]
            # Behind the queries lie keys and values.
            step.take(layer, torch.cat((torch.stack(rows), torch.full((len(rows), 32), torch.nan)), dim=1))
        if not fails:
            step.commit()

    def known(self, lane: int = 0, statistic: FutureAttention = WINDOW) -> list[tuple[int, int]]:
        """(owner, position) of the queries, the same in both layers."""
        found = []
        for layer in range(2):
            queries = self.memory.last(lane, statistic, layer)
            assert queries.shape == (len(queries), 2, 16)
            ids = [divmod(int(q[0, 0]) - 100 * layer, 10**6) for q in queries]
            found.append([(owner, rest // 1000) for owner, rest in ids])
            for q, (owner, position) in zip(queries, found[-1], strict=True):
                assert torch.equal(q.flatten(), query(owner, position, layer))
        assert found[0] == found[1]
        return found[0]


def positions(owner: int, begin: int, end: int) -> list[tuple[int, int]]:
    return [(owner, position) for position in range(begin, end)]


@given(cuts=st.sets(st.integers(1, 49)), window=st.integers(1, 60))
def test_chunks_change_nothing(cuts: set[int], window: int) -> None:
    driver, statistic, begin = Driver(), FutureAttention(window=window), 0
    for end in [*sorted(cuts), 50]:
        driver.step(Part(3, begin, end, wants=[statistic]))
        assert driver.known(statistic=statistic) == positions(3, max(0, end - window), end)
        begin = end


def test_lanes_are_apart() -> None:
    driver = Driver()
    driver.step(Part(1, 0, 20, lane=5), Part(2, 0, 3, lane=2), Part(3, 0, 1, lane=0))
    driver.step(Part(3, 1, 2, lane=0), Part(2, 3, 12, lane=2))
    assert driver.known(5) == positions(1, 12, 20)
    assert driver.known(2) == positions(2, 4, 12)
    assert driver.known(0) == positions(3, 0, 2)


def test_a_text_that_begins_later_knows_what_was_computed() -> None:
    """After a prefix hit, or as a fork."""
    driver = Driver()
    driver.step(Part(1, 37, 40))
    driver.step(Part(1, 40, 42))
    assert driver.known() == positions(1, 37, 42)


def test_tokens_that_are_computed_again_count_once() -> None:
    driver = Driver()
    driver.step(Part(1, 0, 20))
    driver.step(Part(1, 14, 17))  # as after a step that failed
    assert driver.known() == positions(1, 12, 17)
    driver.step(Part(1, 17, 18))
    assert driver.known() == positions(1, 12, 18)
    driver.step(Part(1, 0, 3))  # as after a preemption
    assert driver.known() == positions(1, 0, 3)


@pytest.mark.parametrize("begin", [21, 30])
def test_behind_a_gap_it_begins_anew(begin: int) -> None:
    driver = Driver()
    driver.step(Part(1, 0, 20))
    driver.step(Part(1, begin, begin + 2))
    assert driver.known() == positions(1, begin, begin + 2)


def test_another_sequence_in_the_lane_begins_anew_even_where_it_would_join_on() -> None:
    driver = Driver()
    driver.step(Part(1, 0, 20))
    driver.step(Part(2, 20, 21))
    assert driver.known() == positions(2, 20, 21)


def test_a_lane_that_runs_unordered_forgets_and_one_that_does_not_run_remembers() -> None:
    driver = Driver()
    driver.step(Part(1, 0, 20, lane=0), Part(2, 0, 20, lane=1))
    driver.step(Part(1, 20, 21, lane=0, wants=[]))
    assert driver.known(1) == positions(2, 12, 20)
    with pytest.raises(KeyError):
        driver.known(0)
    driver.step(Part(1, 21, 22, lane=0))
    assert driver.known(0) == positions(1, 21, 22)


def test_a_step_that_fails_changes_nothing() -> None:
    driver = Driver()
    driver.step(Part(1, 0, 20))
    driver.step(Part(1, 20, 25), Part(2, 0, 3, lane=1), fails=True)
    assert driver.known() == positions(1, 12, 20)
    with pytest.raises(KeyError):
        driver.known(1)


def test_windows_of_several_sizes() -> None:
    driver, short = Driver(), FutureAttention(window=3)
    driver.step(Part(1, 0, 6, wants=[WINDOW, short]), Part(2, 0, 7, lane=1, wants=[short]))
    driver.step(Part(1, 6, 10, wants=[WINDOW, short]))
    assert driver.known(0) == positions(1, 2, 10)
    assert driver.known(0, short) == positions(1, 7, 10)
    assert driver.known(1, short) == positions(2, 4, 7)


def test_nothing_is_kept_for_other_statistics() -> None:
    driver = Driver()
    assert driver.memory.begin(driver.plan([Part(1, 0, 5, wants=[])])) is None


def test_an_order_without_owners_is_our_bug() -> None:
    plan = make_plan([Slice(Lane(4, [1]), [5])], statistics=[replace(order(WINDOW, [0]), owners=None)])
    with pytest.raises(AssertionError, match="owners"):
        QueryMemory(SPEC).begin(plan)
