"""`LayerCache`: one layer of the KV cache as attention and the copies see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vtoken.base.kv_format import KVFormat
from vtoken.quant.kv_format import decode, encode


@dataclass(frozen=True, eq=False)
class CachePlane:
    """The keys, or the values, of one layer. A block is one contiguous run."""

    cells: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim] in the storage type of `form`
    scales: Tensor | None  # [num_blocks, num_kv_heads, block_size] float32, where `form` has scales
    form: KVFormat

    @cached_property
    def address(self) -> int:
        """Where `cells` lies in memory, for the compiled kernels."""
        assert self.cells.is_contiguous()
        return self.cells.data_ptr()

    @cached_property
    def scale_address(self) -> int | None:
        assert (self.scales is not None) == self.form.has_scales
        return None if self.scales is None else self.scales.data_ptr()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What has to move when a slot moves: all are indexed [block, head, offset]."""
        return (self.cells,) if self.scales is None else (self.cells, self.scales)

    def write(self, x: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Store x [T, num_kv_heads, head_dim] at these places; return it as the cache holds it, in float32."""
        cells, scales = encode(self.form, x)
        self.cells[blocks, :, offsets] = cells
        if self.scales is not None and scales is not None:
            self.scales[blocks, :, offsets] = scales
        return decode(self.form, cells, scales)

    def read(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Decode what lies at these places, and not one slot more: float32 [P, num_kv_heads, head_dim]."""
        return self.read_cells(self.cells_of(blocks, offsets))

    def cells_of(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """[P, num_kv_heads] numbers of cells, the same in every plane of this shape, whatever the layer."""
        _, num_kv_heads, block_size, _ = self.cells.shape
        heads = torch.arange(num_kv_heads)
        return (blocks[:, None] * num_kv_heads + heads) * block_size + offsets[:, None]

    def read_cells(self, numbers: Tensor) -> Tensor:
        """Decode single cells: numbers [...] as of `cells_of`, in any order -> float32 [..., head_dim]."""
        flat, head_dim = numbers.flatten(), self.cells.shape[3]
        scales = None if self.scales is None else self.scales.view(-1).index_select(0, flat)
        found = decode(self.form, self.cells.view(-1, head_dim).index_select(0, flat), scales)
        return found.view(*numbers.shape, head_dim)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer."""

    keys: CachePlane
    values: CachePlane

    @property
    def block_size(self) -> int:
        return self.keys.cells.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys.tensors + self.values.tensors
