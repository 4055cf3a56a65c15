"""`AttentionMetadata`: the live past of each slice, read off block tables and masks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.plans import Lane, Slice, make_plan
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.registry import BACKENDS
from vtoken.base.errors import ConfigError


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
    past_only = Slice(Lane(4, [1, 2]), [5, 5, 5])
    meta = AttentionMetadata.from_plan(make_plan([past_only], statistics=["attention"]))
    assert meta.statistics["attention"].shape == (1, 8)
    assert meta.statistics["attention"].dtype == np.float64


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
