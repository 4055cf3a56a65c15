"""`Lanes`: opened, closed, used again; tables that grow when somebody needs it and not before."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.memory.block_table import EMPTY, BlockTable
from vtoken.memory.lanes import Lanes
from vtoken.memory.token_table import TokenTable


def small() -> tuple[Lanes, BlockTable, TokenTable]:
    blocks = BlockTable(4, num_lanes=2, num_entries=3)
    tokens = TokenTable(blocks, {"mass": np.float64})
    return Lanes(blocks, tokens), blocks, tokens


def test_a_closed_lane_is_the_next_one_out_and_is_clear() -> None:
    lanes, blocks, tokens = small()
    assert [lanes.open(1), lanes.open(1)] == [0, 1]
    blocks.ids[0, 0], blocks.num_entries[0] = 7, 1
    tokens.append(np.zeros(2, np.int64), np.arange(2), np.arange(2))
    lanes.on_host[0] = True
    lanes.close(0)
    assert lanes.used == [1]
    assert lanes.open(3) == 0
    assert (blocks.ids[0] == EMPTY).all()
    assert tokens.num_live[0] == tokens.lengths[0] == 0
    assert not lanes.on_host[0]
    assert blocks.ids.shape == (2, 3), "there was room, so nothing grew"


def test_tables_grow_by_doubling() -> None:
    lanes, blocks, tokens = small()
    assert [lanes.open(1) for _ in range(3)] == [0, 1, 2]
    assert blocks.ids.shape == (4, 3)
    assert (tokens.positions.shape, tokens.columns["mass"].shape) == ((4, 12), (4, 12))
    assert len(lanes.is_open) == len(lanes.on_host) == 4
    lanes.ensure(4)
    assert blocks.ids.shape == (4, 6)
    lanes.ensure(100)
    assert blocks.ids.shape == (4, 100)
    assert lanes.free == [3]


def test_who_is_on_the_device() -> None:
    lanes, _, _ = small()
    lane, other = lanes.open(1), lanes.open(1)
    lanes.require_on_device([lane, other])
    lanes.on_host[other] = True
    lanes.require_on_device(np.array([lane]))
    with pytest.raises(ValueError, match="in use and on the device"):
        lanes.require_on_device([lane, other])
    lanes.close(lane)
    with pytest.raises(ValueError, match="in use and on the device"):
        lanes.require_on_device([lane])
