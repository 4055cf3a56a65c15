"""The closed forms against a plain loop over queries, heads and tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plans import Lane, Slice, make_plan, order
from vtoken.bench.heavy_hitters import AttentionModel, HeavyHitters
from vtoken.executor.sim import SimExecutor
from vtoken.memory.copy import Copy, CopyKind
from vtoken.policies.statistics import AttentionStatistic, CountLow, KeyNorm, Sum, SumLast

SIZE = 4
MODEL = AttentionModel(reach=6, decay=0.7)


def attention(tokens: dict[int, int], query: int) -> dict[int, list[float]]:
    """Position -> what it draws from the query, head by head; `tokens` are those that the query sees, itself too."""
    weights = {
        position: MODEL.weights(np.array([token], np.int32), np.array([position], np.int32))[0]
        for position, token in tokens.items()
    }
    near = [MODEL.decay**d for d in range(MODEL.reach)]
    drawn = {}
    for position, weight in weights.items():
        shares = []
        for head in range(MODEL.num_heads):
            share = MODEL.share * weight[head] / sum(other[head] for other in weights.values())
            if query - position < MODEL.reach:
                share += (1 - MODEL.share - MODEL.sink) * near[query - position] / sum(near)
            if position == 0:
                share += MODEL.sink
            shares.append(float(share))
        drawn[position] = shares
    return drawn


@dataclass
class OneText:
    """A text that is computed in chunks and loses tokens on the way, and what its statistics have to be."""

    statistic: AttentionStatistic
    first: int = 0  # queries at lower positions are not counted
    lane: Lane = field(default_factory=lambda: Lane(SIZE, list(range(40))))
    got: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # position -> what was reported
    due: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tokens: dict[int, int] = field(default_factory=dict)  # alive
    length: int = 0

    def __post_init__(self) -> None:
        self.executor = HeavyHitters(SimExecutor(40, SIZE), MODEL)

    def compute(self, token_ids: list[int]) -> None:
        chunk = Slice(self.lane, token_ids, first_position=self.length)
        result = self.executor.execute(make_plan([chunk], statistics=[order(self.statistic, [0], self.first)]))
        rows = result.statistics[self.statistic.name][0]
        chunk.commit()
        for row, position in self.lane.past.items():
            self.got[position] += float(rows[row])
        for token in token_ids:
            self.tokens[self.length] = token
            if self.length >= self.first:
                self._expect(attention(self.tokens, self.length))
            self.length += 1

    def _expect(self, drawn: dict[int, list[float]]) -> None:
        for position, shares in drawn.items():
            if isinstance(self.statistic, CountLow):
                self.due[position] += sum(share < 1 / len(drawn) for share in shares)
            else:
                self.due[position] += sum(shares)

    def evict(self, position: int) -> None:
        del self.tokens[position]
        row = next(row for row, at in self.lane.past.items() if at == position)
        del self.lane.past[row]

    def check(self) -> None:
        for position in self.tokens:
            assert self.got[position] == pytest.approx(self.due[position], abs=1e-9), position


@settings(deadline=None, max_examples=30)
@given(
    statistic=st.sampled_from([Sum(), SumLast(5), CountLow(5)]),
    first=st.sampled_from([0, 3, 9, 25]),
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    victims=st.lists(st.integers(0, 40), max_size=8),
)
def test_sums_and_counts_are_those_of_a_plain_loop(
    statistic: AttentionStatistic, first: int, chunks: list[int], victims: list[int]
) -> None:
    text = OneText(statistic, first)
    for i, count in enumerate(chunks):
        text.compute([(7 * i + j) % 11 for j in range(count)])
        for victim in victims[i : i + 2]:
            if victim in text.tokens and len(text.tokens) > 1:
                text.evict(victim)
    text.check()


def test_a_query_gives_all_of_its_attention_and_most_of_it_unevenly() -> None:
    tokens = {position: position % 7 for position in range(200)}
    drawn = attention(tokens, 199)
    assert sum(sum(shares) for shares in drawn.values()) == pytest.approx(MODEL.num_heads)
    far = sorted(sum(drawn[p]) for p in range(1, 190))
    assert sum(far[-19:]) > 2.5 * sum(far) / 10, "a tenth of the tokens draws far more than a tenth"


def test_weights_spread_as_measured_on_a_real_model() -> None:
    weights = AttentionModel().weights(np.arange(4000, dtype=np.int32), np.arange(4000, dtype=np.int32))
    assert np.log(weights.mean(axis=1)).std() == pytest.approx(0.75, abs=0.05)


def test_a_token_takes_its_weight_along_when_it_moves() -> None:
    statistic = Sum()
    here, moved = OneText(statistic), OneText(statistic)
    for text in (here, moved):
        text.compute([1, 2, 3, 4, 5, 6])
    # Rows 4 and 5 go to the third block.
    rows = {4: 8, 5: 9}
    moved.lane.past = {rows.get(row, row): position for row, position in moved.lane.past.items()}
    copy = Copy(CopyKind.RELOCATE, np.array([4, 5]), np.array([8, 9]))
    plans = [
        make_plan([Slice(text.lane, [9], first_position=6, rows=[6])], statistics=[statistic], copies=copies)
        for text, copies in ((here, ()), (moved, (copy,)))
    ]
    left = here.executor.execute(plans[0]).statistics[statistic.name][0]
    right = moved.executor.execute(plans[1]).statistics[statistic.name][0]
    assert right[[0, 1, 2, 3, 8, 9, 6]] == pytest.approx(left[:7])


def test_a_beside_copy_counts_when_it_has_ended() -> None:
    executor = HeavyHitters(SimExecutor(8, SIZE, beside_delay=1), MODEL)
    lane = Lane(SIZE, [0, 1, 2])
    first = Slice(lane, [1, 2, 3, 4, 5])
    executor.execute(make_plan([first]))
    first.commit()
    copy = Copy(CopyKind.RELOCATE, np.array([4]), np.array([8]), ticket=3)
    second = Slice(lane, [6])
    began = executor.execute(make_plan([second], copies=[copy], step=1))
    second.commit()
    assert began.ended == ()
    assert not executor._weights[8].any()
    assert executor.execute(make_plan([Slice(lane, [7])], step=2)).ended == (3,)
    assert executor._weights[8].tolist() == executor._weights[4].tolist()


def test_statistics_of_the_cache_are_left_to_the_simulator() -> None:
    executor, plain = HeavyHitters(SimExecutor(8, SIZE), MODEL), SimExecutor(8, SIZE)
    plan = make_plan([Slice(Lane(SIZE, [0, 1]), [1, 2, 3])], statistics=[KeyNorm(), Sum()])
    both = executor.execute(plan)
    alone = plain.execute(make_plan([Slice(Lane(SIZE, [0, 1]), [1, 2, 3])], statistics=[KeyNorm()]))
    assert set(both.statistics) == {KeyNorm().name, Sum().name}
    np.testing.assert_array_equal(both.statistics[KeyNorm().name], alone.statistics[KeyNorm().name])
    assert both.tokens.tolist() == alone.tokens.tolist()
