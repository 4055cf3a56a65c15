"""`AttentionMetadata`: the live past of each slice, read off block tables and masks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.plans import Lane, Slice, make_plan, order
from vtoken.attention.metadata import NOBODY, AttentionMetadata
from vtoken.attention.registry import BACKENDS
from vtoken.base.errors import ConfigError
from vtoken.policies.statistics import CountLow, KeyNorm, Sum, SumLast
from vtoken.schedule.plan import StatisticOrder


def test_rows_are_positions_until_a_token_is_lost() -> None:
    lane = Lane(4, [7, 2], past={0: 0, 1: 1, 2: 2, 3: 3, 4: 4})
    plan = make_plan([Slice(lane, [9])])
    assert plan.row_positions is None
    (past,) = AttentionMetadata.from_plan(plan).pasts
    assert past.slots.tolist() == [28, 29, 30, 31, 8]
    assert past.rows.tolist() == past.positions.tolist() == [0, 1, 2, 3, 4]


def test_the_past_is_in_order_of_position() -> None:
    # Positions 1 and 2 died, and 6 and 7 took their cells; block 2 was returned.
    lane = Lane(4, [7, -1, 3], past={0: 0, 2: 6, 1: 7, 3: 3, 9: 5})
    (past,) = AttentionMetadata.from_plan(make_plan([Slice(lane, [9], rows=[10])])).pasts
    assert past.positions.tolist() == [0, 3, 5, 6, 7]
    assert past.rows.tolist() == [0, 3, 9, 2, 1]
    assert past.slots.tolist() == [28, 31, 13, 30, 29]


@pytest.mark.parametrize("block_size", [4, 31, 32, 33, 64, 100, 256])
def test_masks_of_several_words(block_size: int) -> None:
    rows = sorted({0, block_size - 1, block_size, 2 * block_size - 2, block_size // 2})
    lane = Lane(block_size, [1, 0], past={row: row for row in rows})
    plan = make_plan([Slice(lane, [9])])
    assert plan.masks.shape == (1, 2, -(-block_size // 32))
    (past,) = AttentionMetadata.from_plan(plan).pasts
    assert past.rows.tolist() == rows


def test_statistics_have_a_column_for_every_row_that_is_written() -> None:
    plan = make_plan([Slice(Lane(4, [1, 2]), [5, 5, 5])], statistics=[Sum()])
    gathered = AttentionMetadata.from_plan(plan).gathered(plan.statistics[0])
    assert gathered.shape == (1, 8)
    assert gathered.dtype == np.float64
    behind = make_plan([Slice(Lane(4, [1, 2, 3]), [5], rows=[9])], statistics=[Sum()])
    meta = AttentionMetadata.from_plan(dataclasses.replace(behind, block_tables=behind.block_tables[:, :2]))
    assert meta.gathered(behind.statistics[0]).shape == (1, 10)


class TestTallies:
    def metadata(self, *statistics: StatisticOrder) -> AttentionMetadata:
        slices = [Slice(Lane(4, [i]), [5]) for i in range(4)]
        return AttentionMetadata.from_plan(make_plan(slices, statistics=statistics))

    def test_orders_share_one_as_long_as_they_name_different_slices(self) -> None:
        meta = self.metadata(order(Sum(), [0, 2]), order(SumLast(7), [1], first=-3))
        (tally,) = meta.tallies
        assert tally.first.tolist() == [0, -3, 0, NOBODY]
        assert not tally.counts_low

    def test_a_slice_that_wants_two_sums_has_two(self) -> None:
        orders = order(Sum(), [0, 2]), order(SumLast(7), [2, 3], first=[5, 6]), order(SumLast(9), [1], first=8)
        meta = self.metadata(*orders)
        assert [tally.first.tolist() for tally in meta.tallies] == [[0, 8, 0, NOBODY], [NOBODY, NOBODY, 5, 6]]
        for i, tally in enumerate(meta.tallies):
            tally.values[:] = np.arange(4)[:, None] + 10 * i
        assert [meta.gathered(each)[:, 0].tolist() for each in orders] == [[0, 2], [12, 13], [1]]

    def test_counts_and_sums_are_apart(self) -> None:
        meta = self.metadata(order(Sum(), [0]), order(CountLow(7), [1]))
        assert [tally.counts_low for tally in meta.tallies] == [False, True]

    def test_what_is_read_from_the_cache_needs_none(self) -> None:
        assert not self.metadata(order(KeyNorm(), [0])).tallies


def test_a_plan_that_contradicts_itself_is_our_bug() -> None:
    lane = Lane(4, [7, 2], past={0: 0, 1: 1})
    plan = make_plan([Slice(lane, [9])])
    with pytest.raises(AssertionError, match="past_live says 3"):
        _ = AttentionMetadata.from_plan(dataclasses.replace(plan, past_live=np.array([3], np.int32))).pasts
    tables = plan.block_tables.copy()
    tables[0, 0] = -1
    with pytest.raises(AssertionError, match="EMPTY"):
        _ = AttentionMetadata.from_plan(dataclasses.replace(plan, block_tables=tables)).pasts


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown attention backend 'refrence'.*reference"):
        BACKENDS["refrence"]
