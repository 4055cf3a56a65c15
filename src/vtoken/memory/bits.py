"""Live masks: one bit a slot, `uint32[..., ceil(block_size / 32)]`, bit `i % 32` of word `i // 32` for offset `i`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD = 32

Ints = NDArray[np.signedinteger[Any]]  # lanes, rows, entries, blocks: indices of any width


def words_per_block(block_size: int) -> int:
    return -(-block_size // WORD)


def full_block(block_size: int) -> NDArray[np.uint32]:
    """[words] the mask of a block in which every token is live."""
    bits = np.minimum(np.maximum(block_size - WORD * np.arange(words_per_block(block_size)), 0), WORD)
    return ((np.uint64(1) << bits.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)


def count(masks: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Live tokens a block: [..., words] -> [...]."""
    if masks.shape[-1] == 1:
        return np.bitwise_count(masks[..., 0]).astype(np.int32)
    total: NDArray[np.int32] = np.bitwise_count(masks).sum(axis=-1, dtype=np.int32)
    return total


def unpack(masks: NDArray[np.uint32], block_size: int) -> NDArray[np.bool_]:
    """One bool a slot: [..., entries, words] -> [..., entries * block_size]."""
    *lead, entries, words = masks.shape
    little = np.ascontiguousarray(masks, dtype="<u4").view(np.uint8)  # byte order made explicit for unpackbits
    bits = np.unpackbits(little, axis=-1, bitorder="little")
    slots = bits.reshape(*lead, entries, words * WORD)[..., :block_size]
    return slots.reshape(*lead, entries * block_size).view(np.bool_)


def lowest_bit(words: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Index of the lowest set bit; 32 for an empty word."""
    return np.bitwise_count((words & (~words + np.uint32(1))) - np.uint32(1)).astype(np.int32)


def occupied(masks: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Whether a block has any bit set: [..., words] -> [...]."""
    found: NDArray[np.bool_] = masks[..., 0] != 0 if masks.shape[-1] == 1 else np.any(masks, axis=-1)
    return found
