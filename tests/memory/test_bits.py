"""Masks against plain Python sets of offsets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import BLOCK_SIZES, block_sizes
from vtoken.memory import bits


@st.composite
def blocks_of_offsets(draw: st.DrawFn) -> tuple[int, list[set[int]]]:
    size = draw(block_sizes())
    return size, draw(st.lists(st.sets(st.integers(0, size - 1)), min_size=1, max_size=4))


def masks_of(size: int, blocks: list[set[int]]) -> np.ndarray:
    masks = np.zeros((len(blocks), bits.words_per_block(size)), np.uint32)
    for block, offsets in enumerate(blocks):
        for offset in offsets:
            masks[block, offset // 32] |= np.uint32(1 << offset % 32)
    return masks


@given(blocks_of_offsets())
def test_count_unpack_and_occupied(case: tuple[int, list[set[int]]]) -> None:
    size, blocks = case
    masks = masks_of(size, blocks)
    assert bits.count(masks).tolist() == [len(offsets) for offsets in blocks]
    assert bits.occupied(masks).tolist() == [bool(offsets) for offsets in blocks]
    rows = [block * size + offset for block, offsets in enumerate(blocks) for offset in sorted(offsets)]
    assert np.flatnonzero(bits.unpack(masks, size)).tolist() == rows
    # With leading dimensions, as for many lanes at once.
    assert bits.unpack(np.stack((masks, masks)), size).shape == (2, len(blocks) * size)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_full_block_has_one_bit_a_slot_and_no_more(size: int) -> None:
    full = bits.full_block(size)
    assert bits.count(full) == size
    assert bits.unpack(full[None], size).all()
    assert np.array_equal(full, masks_of(size, [set(range(size))])[0])


@given(st.integers(0, 2**32 - 1))
def test_lowest_bit(word: int) -> None:
    expected = (word & -word).bit_length() - 1 if word else 32
    assert bits.lowest_bit(np.array([word], np.uint32)).tolist() == [expected]
