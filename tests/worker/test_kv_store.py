"""`KVStore`."""

from __future__ import annotations

import pytest
import torch

from vtoken.base.errors import ConfigError
from vtoken.base.host_memory import advise_huge_pages
from vtoken.base.kv_format import KV_FORMATS
from vtoken.planner.kv_memory import KVShape
from vtoken.worker.kv_store import KVStore


@pytest.mark.parametrize("keys", KV_FORMATS)
@pytest.mark.parametrize("values", KV_FORMATS)
def test_layout_and_size(keys: str, values: str) -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, key_dtype=keys, value_dtype=values)
    store = KVStore(shape, num_blocks=10, block_size=5)
    assert len(store.layers) == 3
    for cache in store.layers:
        assert cache.block_size == 5
        for plane in (cache.keys, cache.values):
            assert plane.cells.shape == (10, 2, 5, 8)
            assert (plane.scales is not None) == plane.form.has_scales
            assert plane.scales is None or plane.scales.shape == (10, 2, 5)
    assert all(tensor.is_contiguous() for tensor in store.tensors)
    assert store.nbytes == 10 * 5 * shape.bytes_per_token
    assert store.nbytes == sum(tensor.nbytes for tensor in store.tensors), "what the planner counts is what is taken"


def test_a_token_goes_into_its_slot_and_nowhere_else() -> None:
    store = KVStore(KVShape(2, 3, 8, "float32"), 4, 5)
    for tensor in store.tensors:
        tensor.zero_()
    written, slots = torch.randn(3, 3, 8), torch.tensor([0, 7, 19])
    store.layers[1].values.write(written, slots // 5, slots % 5)
    cells = store.layers[1].values.cells
    assert torch.equal(cells[0, :, 0], written[0])
    assert torch.equal(cells[1, :, 2], written[1])
    assert torch.equal(cells[3, :, 4], written[2])
    assert sum(int(torch.count_nonzero(tensor)) for tensor in store.tensors) == torch.count_nonzero(written)


@pytest.mark.parametrize("form", KV_FORMATS)
def test_write_returns_what_the_store_holds(form: str) -> None:
    plane = KVStore(KVShape(1, 1, 8, form), 1, 4).layers[0].keys
    x, blocks, offsets = torch.randn(2, 1, 8), torch.zeros(2, dtype=torch.long), torch.tensor([1, 2])
    kept = plane.write(x, blocks, offsets)
    assert torch.equal(kept, plane.read(blocks, offsets))
    assert torch.equal(kept, x) == (form == "float32")
    torch.testing.assert_close(kept, x, atol=0.1, rtol=0.1)


def test_huge_pages_are_advice_only() -> None:
    """Any range may be named, and what lies there stays."""
    x = torch.arange(3 * 2**20, dtype=torch.int32)
    for begin, size in ((0, x.nbytes), (1, 10), (4095, 4098), (7, 0)):
        advise_huge_pages(x.data_ptr() + begin, size)
    assert torch.equal(x, torch.arange(3 * 2**20, dtype=torch.int32))


def test_prefault_leaves_zeros() -> None:
    store = KVStore(KVShape(2, 2, 8, "int8"), 4, 5)
    for tensor in store.tensors:
        tensor.fill_(7)
    store.prefault()
    assert not any(tensor.any() for tensor in store.tensors)


def test_no_blocks_at_all() -> None:
    assert KVStore(KVShape(2, 2, 8, "float32"), 0, 16).nbytes == 0


def test_memory_that_cannot_be_had() -> None:
    num_bytes = 2 * 2 * 2**40 * 16 * 2 * 8 * 4
    with pytest.raises(ConfigError, match=rf"{2**40} blocks of 16 tokens needs {num_bytes} bytes"):
        KVStore(KVShape(2, 2, 8, "float32"), 2**40, 16)


def test_a_size_beyond_64_bits() -> None:
    with pytest.raises(ConfigError, match="blocks"):
        KVStore(KVShape(2, 2, 8, "float32"), 2**62, 16)
