"""C2: a slice of the old contiguous cache equals the gathered pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.plans import Lane, Slice, make_plan
from vtoken.attention.metadata import AttentionMetadata
from vtoken.planner.kv_memory import KVShape
from vtoken.worker.kv_store import KVStore

NUM_TOKENS, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 53, 2, 3, 8


@pytest.mark.parametrize("block_size", [4, 7, 16, 24])
def test_gathered_pages_are_the_contiguous_cache(block_size: int) -> None:
    """Written in chunks into blocks in random places, then read back through the block table."""
    rng, num_blocks = np.random.default_rng(block_size), 40
    contiguous = torch.randn(2, NUM_LAYERS, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)  # the old cache: keys and values
    store = KVStore(KVShape(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, "float32"), num_blocks, block_size)
    lane = Lane(block_size, rng.permutation(num_blocks)[: -(-NUM_TOKENS // block_size)].tolist())
    for begin in range(0, NUM_TOKENS, 10):
        part = Slice(lane, [0] * min(10, NUM_TOKENS - begin))
        plan = make_plan([part])
        for layer in range(NUM_LAYERS):
            slots = torch.from_numpy(plan.write_slots)
            cache = store.layers[layer]
            for plane, old in zip((cache.keys, cache.values), contiguous[:, layer, part.positions], strict=True):
                plane.write(old, slots // block_size, slots % block_size)
        part.commit()

    (past,) = AttentionMetadata.from_plan(make_plan([Slice(lane, [0], rows=[NUM_TOKENS - 1])])).pasts
    assert past.positions.tolist() == list(range(NUM_TOKENS))
    assert (np.diff(past.slots.numpy()) != 1).any(), "the pages are scattered, or the test proves nothing"
    for layer in range(NUM_LAYERS):
        for old, cache in zip(contiguous[:, layer], store.layers[layer].tensors, strict=True):
            pages = cache.transpose(1, 2).flatten(0, 1)  # [slots, num_kv_heads, head_dim]
            for begin, end in ((0, NUM_TOKENS), (5, 6), (9, 40), (NUM_TOKENS - 1, NUM_TOKENS)):
                assert torch.equal(pages[past.slots[begin:end]], old[begin:end])
