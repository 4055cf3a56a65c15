"""C7: attention reads only the slots a sequence owns or shares; bytes are counted."""

from __future__ import annotations

import torch

from tests.attention.layer import Layer, Text
from tests.plans import Lane, Slice

BLOCK_SIZE = 16


def test_every_live_slot_is_read_once_and_no_other() -> None:
    """Cells of other sequences, dead cells, free cells and tail slack are NaN: one read would show in the output."""
    text = Text.random(60)
    layer = Layer(text, block_size=BLOCK_SIZE, num_blocks=32)
    # Two sequences share their first two blocks; each has a block of its own.
    owner, sharer = Lane(BLOCK_SIZE, [9, 4, 17]), Lane(BLOCK_SIZE, [9, 4, 22], past={row: row for row in range(32)})
    layer.step([(Slice(owner, [0] * 40), text)])
    assert layer.backend.slots_read == 0, "a first chunk has no past"
    layer.step([(Slice(sharer, [0] * 5, first_position=32), text)])
    assert layer.backend.slots_read == 32
    for position in (3, 10, 11):  # deaths are per sequence: in the shared blocks the other one goes on reading them
        del sharer.past[position]
    layer.kill(owner, [35, 36, 38])

    before = layer.backend.slots_read
    outputs, _ = layer.step([(Slice(owner, [0]), text), (Slice(sharer, [0], rows=[37]), text)])
    slots_read = layer.backend.slots_read - before
    assert slots_read == (40 - 3) + (37 - 3)
    assert all(torch.isfinite(out).all() for out in outputs)
    bytes_read = slots_read * layer.store.shape.bytes_per_token
    assert bytes_read == (37 + 34) * 2 * text.k.shape[1] * text.k.shape[2] * 4


def test_the_rest_of_the_pool_does_not_matter() -> None:
    """Whatever other cells hold, the output has the same bits; what the sequence's own cells hold does matter."""
    text = Text.random(60)
    outputs = []
    for rest in (torch.nan, 0.0, 1e30):
        layer = Layer(text, block_size=BLOCK_SIZE, num_blocks=32)
        lane = Lane(BLOCK_SIZE, [9, 4, 17])
        layer.step([(Slice(lane, [0] * 40), text)])
        layer.kill(lane, [5, 20, 21])
        for cache in layer.store.tensors:
            cache.nan_to_num_(nan=rest)
        outputs.append(layer.step([(Slice(lane, [0] * 3), text)])[0][0])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])

    for position in (40, 41, 42):  # the same step again
        del lane.past[position]
    layer.store.layers[0].values.cells[9, :, 2] += 1  # position 2: a live one
    changed, _ = layer.step([(Slice(lane, [0] * 3, first_position=40), text)])
    assert not torch.equal(changed[0], outputs[0])
