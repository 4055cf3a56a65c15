"""Each policy keeps what its paper keeps: plain loops over a toy's attention, keys and values decide as well."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.policies.toy import Toy, norms
from tests.policies.views import Lane, view_of
from vtoken.policies.base import Policy, TokenView
from vtoken.policies.expected_attention import ExpectedAttention
from vtoken.policies.h2o import H2O
from vtoken.policies.keydiff import KeyDiff
from vtoken.policies.knorm import Knorm
from vtoken.policies.lagkv import LagKV
from vtoken.policies.paged_eviction import PagedEviction
from vtoken.policies.random import Random
from vtoken.policies.rkv import RKV
from vtoken.policies.scissorhands import Scissorhands
from vtoken.policies.snapkv import SnapKV
from vtoken.policies.statistics import FutureAttention
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.policies.tova import TOVA
from vtoken.policies.victims import choose_victims, protection

Floats = NDArray[np.float64]

SEEDS = range(5)


def asked(policy: Policy, toy: Toy, budget: int) -> TokenView:
    """What the policy is shown of a toy's text of which every token lives."""
    statistics = {need: toy.statistic(need) for need in policy.needs}
    return view_of(Lane(range(toy.num_tokens), statistics, budget=budget), padding=3)


def kept(policy: Policy, toy: Toy, budget: int) -> list[int]:
    """Positions that are left of a toy's text when the policy is asked once."""
    view = asked(policy, toy, budget)
    victims = choose_victims(policy, view, protection(policy, view), np.array([toy.num_tokens - budget]))
    return view.positions[view.is_live & ~victims].tolist()


def best(scores: Floats, count: int) -> list[int]:
    """The `count` highest; of equal ones the newer."""
    return sorted(range(len(scores)), key=lambda i: (scores[i], i))[len(scores) - count :]


@pytest.mark.parametrize("seed", SEEDS)
def test_h2o_keeps_the_recent_half_and_the_heaviest_columns_of_the_attention(seed: int) -> None:
    toy, budget = Toy.random(21, seed), 9
    column_sums = np.zeros(21)
    for head in toy.query_heads():
        for row in toy.attention(*head):
            column_sums += row
    recent = list(range(21 - 4, 21))  # int(0.5 * 9)
    assert kept(H2O(), toy, budget) == sorted(best(column_sums[:-4], 5) + recent)


@pytest.mark.parametrize("seed", SEEDS)
def test_tova_keeps_the_highest_of_the_last_row(seed: int) -> None:
    toy = Toy.random(17, seed)
    last_row = np.mean([toy.attention(*head)[-1] for head in toy.query_heads()], axis=0)
    assert kept(TOVA(), toy, 6) == sorted([*best(last_row[:-1], 5), 16])


@pytest.mark.parametrize("seed", SEEDS)
def test_scissorhands_drops_what_was_unimportant_most_often(seed: int) -> None:
    toy, window, recent = Toy.random(20, seed), 6, 3
    unimportant = [0] * 20
    for head in toy.query_heads():
        attention = toy.attention(*head)
        for i in range(20 - window, 20):
            for j in range(i + 1):
                unimportant[j] += bool(attention[i, j] < 1 / (i + 1))
    drawn = best(-np.array(unimportant[:-recent], np.float64), 8 - recent)
    assert kept(Scissorhands(window=window, recent=recent), toy, 8) == sorted([*drawn, 17, 18, 19])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", [1, 5])
def test_snapkv_keeps_its_window_and_the_peaks_of_what_that_looks_at(seed: int, kernel: int) -> None:
    toy, window = Toy.random(24, seed), 4
    old = 24 - window
    pooled = np.zeros(old)
    for head in toy.query_heads():  # the paper votes in each head; the mean of all heads is the uniform variant
        votes = toy.attention(*head)[-window:, :old].sum(axis=0)
        for j in range(old):
            around = [votes[i] for i in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= i < old]
            pooled[j] += sum(around) / kernel
    expected = sorted(best(pooled, 6) + list(range(old, 24)))
    assert kept(SnapKV(window=window, kernel=kernel), toy, 10) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_knorm_keeps_the_shortest_keys(seed: int) -> None:
    toy = Toy.random(15, seed)
    length = np.mean([norms(toy.keys[head]) for head in toy.kv_heads()], axis=0)
    assert kept(Knorm(), toy, 6) == sorted([*best(-length[:-1], 5), 14])


@pytest.mark.parametrize("seed", SEEDS)
def test_keydiff_keeps_the_keys_least_like_the_mean_key(seed: int) -> None:
    toy = Toy.random(15, seed)
    likeness = np.mean([toy.similarity(*head) for head in toy.kv_heads()], axis=0)
    assert kept(KeyDiff(), toy, 6) == sorted([*best(-likeness[:-1], 5), 14])


@pytest.mark.parametrize("seed", SEEDS)
def test_rkv_mixes_the_peaks_of_attention_with_redundancy(seed: int) -> None:
    toy, window, weight, kernel = Toy.random(24, seed), 4, 0.3, 3
    old = 24 - window
    mass = np.zeros(old)
    for head in toy.query_heads():
        mass += toy.attention(*head)[-window:, :old].sum(axis=0)
    share = mass / sum(mass)
    peaks = [max(share[i] for i in range(j - 1, j + 2) if 0 <= i < old) for j in range(old)]
    repeated = np.mean([toy.redundancy(*head, 0.5) for head in toy.kv_heads()], axis=0)
    raised = [math.exp(each) for each in repeated]
    mixed = np.array([weight * peaks[j] - (1 - weight) * raised[j] / sum(raised) for j in range(old)])
    policy = RKV(window=window, weight=weight, kernel=kernel)
    assert np.allclose(policy.score(asked(policy, toy, 10))[0, :old], mixed)
    assert kept(policy, toy, 10) == sorted(best(mixed, 6) + list(range(old, 24)))


@pytest.mark.parametrize("seed", SEEDS)
def test_lagkv_keeps_the_same_number_of_each_run_and_the_last_run_whole(seed: int) -> None:
    toy, lag, sinks = Toy.random(2 + 4 * 5 + 3, seed), 5, 2
    deviation = np.mean([toy.lag_deviation(*head, lag, sinks) for head in toy.kv_heads()], axis=0)
    expected = [0, 1]
    for start in (2, 7, 12):  # the run from 17 on is the last full one, 22 to 24 are too few
        expected += [start + i for i in best(deviation[start : start + lag], 2)]
    expected += range(17, 25)
    assert kept(LagKV(lag=lag, sinks=sinks), toy, len(expected)) == sorted(expected)


def test_lagkv_drops_the_oldest_where_there_is_no_next_run() -> None:
    assert kept(LagKV(lag=5, sinks=2), Toy.random(11, 0), 6) == [0, 1, 7, 8, 9, 10]


@pytest.mark.parametrize("seed", SEEDS)
def test_paged_eviction_gives_up_the_block_with_the_lowest_mean_of_value_norm_to_key_norm(seed: int) -> None:
    toy = Toy.random(18, seed)  # blocks of 4: the fifth holds two tokens
    value_norms = np.mean([norms(toy.values[head]) for head in toy.kv_heads()], axis=0)
    key_norms = np.mean([norms(toy.keys[head]) for head in toy.kv_heads()], axis=0)
    means = [sum(value_norms[i] / key_norms[i] for i in range(4 * b, 4 * b + 4)) / 4 for b in range(4)]
    dropped = means.index(min(means))
    assert kept(PagedEviction(), toy, 14) == [i for i in range(18) if i // 4 != dropped]


@pytest.mark.parametrize("seed", SEEDS)
def test_expected_attention_keeps_its_sinks_and_the_highest_expectations(seed: int) -> None:
    toy, policy = Toy.random(20, seed), ExpectedAttention(sinks=2)
    expected = toy.statistic(FutureAttention())
    assert policy.needs == (FutureAttention(horizon=512, window=128),)
    assert kept(policy, toy, 8) == sorted([0, 1, *(2 + i for i in best(expected[2:-1], 5)), 19])


def test_streaming_llm_keeps_the_first_four_and_the_last() -> None:
    assert kept(StreamingLLM(), Toy.random(20, 0), 9) == [0, 1, 2, 3, 15, 16, 17, 18, 19]


def test_random_scatters_evenly_and_follows_its_seed() -> None:
    positions = range(4000)
    view = view_of(Lane(positions))
    scores = Random().score(view)[0]
    dead = np.sort(np.argsort(scores)[:2000])
    assert abs(np.mean(dead) - 2000) < 60  # the standard error is 18
    assert abs(np.mean(np.diff(dead) == 1) - 0.5) < 0.05  # neighbours die independently
    assert (Random().score(view) == Random(seed=0).score(view)).all()
    assert np.mean(np.argsort(Random(seed=1).score(view)[0])[:2000] < 2000) < 0.6


def test_random_gives_a_position_the_same_score_wherever_it_is_asked() -> None:
    alone, among = view_of(Lane([7])), view_of(Lane([1, 7, 9]), Lane([5, 6, 7]))
    score = Random(seed=3).score(alone)[0, 0]
    assert Random(seed=3).score(among)[0, 1] == score
    assert Random(seed=3).score(among)[1, 2] == score
