"""`KVStore`."""

from __future__ import annotations

import pytest
import torch

from vtoken.base.errors import ConfigError
from vtoken.worker.kv_store import KVStore


def test_layout_and_size() -> None:
    store = KVStore(num_layers=3, num_blocks=10, block_size=5, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert len(store.keys) == len(store.values) == 3
    assert store.keys[0].shape == store.values[2].shape == (10, 2, 5, 8)
    assert all(cache.is_contiguous() for cache in (*store.keys, *store.values))
    assert store.bytes_per_token == 2 * 3 * 2 * 8 * 2
    assert store.nbytes == 10 * 5 * store.bytes_per_token
    assert store.nbytes == sum(cache.nbytes for cache in (*store.keys, *store.values))


def test_write_puts_each_token_into_its_slot_and_nothing_else() -> None:
    store = KVStore(2, 4, 5, 3, 8, torch.float32)
    for cache in (*store.keys, *store.values):
        cache.zero_()
    k, v = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    store.write(1, k, v, torch.tensor([0, 7, 19]))
    for cache, written in ((store.keys[1], k), (store.values[1], v)):
        assert torch.equal(cache[0, :, 0], written[0])
        assert torch.equal(cache[1, :, 2], written[1])
        assert torch.equal(cache[3, :, 4], written[2])
        assert torch.count_nonzero(cache) == torch.count_nonzero(written)
    assert not store.keys[0].any()
    assert not store.values[0].any()


def test_write_returns_what_the_store_holds() -> None:
    store = KVStore(1, 1, 4, 1, 8, torch.bfloat16)
    k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    kept_k, kept_v = store.write(0, k, v, torch.tensor([1, 2]))
    assert torch.equal(kept_k, store.keys[0][0].transpose(0, 1)[1:3])
    assert torch.equal(kept_v, store.values[0][0].transpose(0, 1)[1:3])
    assert not torch.equal(kept_k.float(), k)


def test_no_blocks_at_all() -> None:
    assert KVStore(2, 0, 16, 2, 8, torch.float32).nbytes == 0


def test_memory_that_cannot_be_had() -> None:
    num_bytes = 2 * 2 * 2**40 * 16 * 2 * 8 * 4
    with pytest.raises(ConfigError, match=rf"{2**40} blocks of 16 tokens needs {num_bytes} bytes"):
        KVStore(2, 2**40, 16, 2, 8, torch.float32)


def test_a_size_beyond_64_bits() -> None:
    with pytest.raises(ConfigError, match="blocks"):
        KVStore(2, 2**62, 16, 2, 8, torch.float32)
