"""CPU attention: the compiled kernels, which read the paged cache in place."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.attention.base import AttentionBackend
from vtoken.attention.cache import LayerCache
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.rotation import Rotation
from vtoken.attention.scan import CACHE_STATISTICS
from vtoken.attention.spec import AttentionSpec
from vtoken.kernels import fused
from vtoken.kernels.attend import AttendArgs, TallyArgs, attend
from vtoken.policies.statistics import CountLow, Statistic, Sum, SumLast


class CpuAttention(AttentionBackend):
    """Attention in float32 by `kernels/csrc/attention*.cpp`. Any head count, head width, block size and KV format.

    Nothing is gathered and no dead cell is read. A slice's result depends on that slice alone: threads and neighbours
    do not change a bit of it. Where its tokens lie in memory does, within rounding.

    `num_threads` None = those of torch at each call. `isa` is one of `kernels.compiler.ISA_FLAGS`, for tests.
    """

    statistics: ClassVar[frozenset[type[Statistic]]] = CACHE_STATISTICS | {Sum, SumLast, CountLow}
    compiled: ClassVar[bool] = True
    needs_row_positions: ClassVar[bool] = False

    def __init__(self, num_threads: int | None = None, isa: str = "native") -> None:
        super().__init__()
        self.num_threads = num_threads
        self.isa = isa
        self._step: _Step | None = None

    def write(
        self, qkv: Tensor, rotation: Rotation | None, cache: LayerCache, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.float().contiguous()
        keys, values = cache.keys, cache.values
        _, num_kv_heads, block_size, head_dim = keys.cells.shape
        fused.rotate_and_write(
            qkv,
            None if rotation is None else (rotation.cos, rotation.sin),
            slots,
            (num_kv_heads, block_size, head_dim),
            (keys.address, keys.scale_address, keys.form.code),
            (values.address, values.scale_address, values.form.code),
        )
        heads = qkv.view(len(qkv), -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        return heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]

    def attend(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: LayerCache,
        meta: AttentionMetadata,
    ) -> Tensor:
        dtype = q.dtype
        q, k_new, v_new = _rows(q), _rows(k_new), _rows(v_new)
        num_tokens, num_heads, head_dim = q.shape
        keys, values = cache.keys, cache.values
        _, num_kv_heads, block_size, width = keys.cells.shape
        assert k_new.shape == v_new.shape == (num_tokens, num_kv_heads, head_dim)
        assert (head_dim, block_size) == (width, meta.block_size)
        assert num_heads % num_kv_heads == 0
        out = torch.empty(num_tokens, num_heads, head_dim)
        if not num_tokens:
            return out.to(dtype)
        args = AttendArgs()
        args.take_plan(self.plan_args(meta))
        args.q, args.k_new, args.v_new, args.out = q.data_ptr(), k_new.data_ptr(), v_new.data_ptr(), out.data_ptr()
        args.q_stride, args.k_stride, args.v_stride = q.stride(0), k_new.stride(0), v_new.stride(0)
        args.keys, args.key_scales, args.key_format = keys.address, keys.scale_address, keys.form.code
        args.values, args.value_scales, args.value_format = values.address, values.scale_address, values.form.code
        args.num_heads, args.num_kv_heads, args.head_dim = num_heads, num_kv_heads, head_dim
        args.scale, args.soft_cap, args.window = spec.scale, spec.soft_cap or 0.0, spec.window or 0
        attend(args, q, k_new, v_new, out, isa=self.isa)
        self.slots_read += args.slots_read
        return out if dtype == torch.float32 else out.to(dtype)

    def plan_args(self, meta: AttentionMetadata) -> AttendArgs:
        """Arguments of the kernels with all that concerns the plan filled in, made once for all layers."""
        if self._step is None or self._step.meta is not meta:
            self._step = _Step(meta, self.num_threads or torch.get_num_threads())
        return self._step.args


class _Step:
    """See `CpuAttention.plan_args`; keeps the arrays that the arguments point to."""

    def __init__(self, meta: AttentionMetadata, num_threads: int) -> None:
        self.meta = meta
        num_slices, num_entries = meta.block_tables.shape
        assert meta.masks.shape == (num_slices, num_entries, -(-meta.block_size // 32))
        assert meta.row_positions is None or meta.row_positions.shape == (num_slices, num_entries * meta.block_size)
        arrays = {
            "starts": _array(np.array(meta.starts), np.int32),
            "positions": _array(meta.positions, np.int64),
            "tables": _array(meta.block_tables, np.int32),
            "masks": _array(meta.masks, np.uint32),
            "past_live": _array(meta.past_live, np.int32),
            "write_rows": _array(meta.write_rows, np.int32),
        }
        if meta.row_positions is not None:
            arrays["row_positions"] = _array(meta.row_positions, np.int32)
        self._tallies = (TallyArgs * len(meta.tallies))(
            *(
                TallyArgs(
                    _address(tally.values, np.float64, (num_slices, tally.values.shape[1])),
                    tally.values.shape[1],
                    _address(tally.first, np.int64, (num_slices,)),
                    tally.counts_low,
                )
                for tally in meta.tallies
            )
        )
        self._alive = arrays  # the kernels read their memory
        self.args = AttendArgs(
            num_slices=num_slices,
            num_entries=num_entries,
            block_size=meta.block_size,
            tallies=ctypes.addressof(self._tallies),
            num_tallies=len(self._tallies),
            num_threads=num_threads,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )


def _address(array: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    """Of an array that the kernels take as it is."""
    assert array.dtype == dtype
    assert array.shape == shape
    assert array.flags.c_contiguous
    return array.ctypes.data


def _array(values: NDArray[np.generic], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.ascontiguousarray(values, dtype=dtype)


def _rows(x: Tensor) -> Tensor:
    """x [T, heads, head_dim] as float32, each token one contiguous run; tokens may lie apart."""
    _, heads, width = x.shape
    if x.dtype == torch.float32 and (width == 1 or x.stride(2) == 1) and (heads == 1 or x.stride(1) == width):
        return x
    return x.float().contiguous()
