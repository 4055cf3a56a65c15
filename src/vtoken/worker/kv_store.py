"""`KVStore`: the memory behind the slots."""

from __future__ import annotations

import torch
from torch import Tensor

from vtoken.attention.cache import CachePlane, LayerCache
from vtoken.base.errors import ConfigError
from vtoken.base.host_memory import advise_huge_pages
from vtoken.base.kv_format import KVFormat
from vtoken.base.units import format_bytes
from vtoken.planner.kv_memory import KVShape
from vtoken.quant.kv_format import STORAGE


class KVStore:
    """Keys and values of every layer, in blocks; used for the device pool and for the host pool of swapped blocks.

    `layers[i]` is the cache of layer `i`; one block of a layer is one contiguous run. Memory is reserved at once, but
    taken from the system page by page as blocks are first written. Cells that no token was written to hold anything,
    NaN included.

    Raises ConfigError when the memory cannot be had.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        try:
            planes = [self._planes(form) for form in (shape.key_format, shape.value_format)]
        except RuntimeError as error:  # torch has no class of its own for "out of memory" on the CPU
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens needs {self.nbytes} bytes "
                f"({format_bytes(self.nbytes)}), which the system refuses; ask for fewer blocks"
            ) from error
        self.layers = tuple(LayerCache(keys, values) for keys, values in zip(*planes, strict=True))

    def _planes(self, form: KVFormat) -> list[CachePlane]:
        shape = (self.shape.num_layers, self.num_blocks, self.shape.num_kv_heads, self.block_size)
        cells = torch.empty(*shape, self.shape.head_dim, dtype=STORAGE[form.name])
        # Attention jumps from block to block: with pages of 4 KB it reads some 10 % slower.
        advise_huge_pages(cells.data_ptr(), cells.nbytes)
        scales = torch.empty(shape) if form.has_scales else [None] * self.shape.num_layers
        return [CachePlane(*layer, form) for layer in zip(cells, scales, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks: keys and values of all layers, scales included."""
        return self.shape.bytes_per_block(self.block_size) * self.num_blocks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that has to move when a slot moves: every tensor is indexed [block, head, offset]."""
        return tuple(tensor for layer in self.layers for tensor in layer.tensors)

    def prefault(self) -> None:
        """Have the system hand out the memory of all blocks now, by writing zeros; what they held is lost."""
        for tensor in self.tensors:
            tensor.zero_()

    def release(self) -> None:
        """Give the memory back; the store has no blocks from then on."""
        self.num_blocks = 0
        self.layers = tuple(LayerCache(_emptied(layer.keys), _emptied(layer.values)) for layer in self.layers)


def _emptied(plane: CachePlane) -> CachePlane:
    scales = None if plane.scales is None else plane.scales[:0].clone()
    return CachePlane(plane.cells[:0].clone(), scales, plane.form)
