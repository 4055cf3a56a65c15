"""`KVStore`: the memory behind the slots."""

from __future__ import annotations

import torch
from torch import Tensor

from vtoken.base.errors import ConfigError
from vtoken.base.units import format_bytes
from vtoken.planner.kv_memory import KVShape


class KVStore:
    """Keys and values of every layer, in blocks; used for the device pool and for the host pool of swapped blocks.

        keys[layer], values[layer]: [num_blocks, num_kv_heads, block_size, head_dim]

    One block of a layer is one contiguous run. Memory is reserved at once, but taken from the system page by page as
    blocks are first written. Cells that no token was written to hold anything, NaN included.

    Raises ConfigError when the memory cannot be had.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.bytes_per_token = KVShape(num_layers, num_kv_heads, head_dim, dtype.itemsize).bytes_per_token
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        try:
            keys, values = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # torch has no class of its own for "out of memory" on the CPU
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens needs {self.nbytes} bytes "
                f"({format_bytes(self.nbytes)}), which the system refuses; ask for fewer blocks"
            ) from error
        self.keys: tuple[Tensor, ...] = keys.unbind()
        self.values: tuple[Tensor, ...] = values.unbind()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, keys and values, all layers."""
        return self.bytes_per_token * self.block_size * self.num_blocks

    def release(self) -> None:
        """Give the memory back; the store has no blocks from then on."""
        self.num_blocks = 0
        self.keys = tuple(cache[:0].clone() for cache in self.keys)
        self.values = tuple(cache[:0].clone() for cache in self.values)

    def write(
        self,
        layer: int,
        k: Tensor,  # [T, num_kv_heads, head_dim]
        v: Tensor,  # [T, num_kv_heads, head_dim]
        slots: Tensor,  # [T] int64
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens and return them as the store holds them, which is what their own chunk has to attend to."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        k, v = k.to(self.dtype), v.to(self.dtype)
        self.keys[layer][blocks, :, offsets] = k
        self.values[layer][blocks, :, offsets] = v
        return k, v
