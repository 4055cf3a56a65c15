"""The linear layers that come with torch: BLAS, oneDNN, and fbgemm with narrow weights."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vtoken.base.errors import ConfigError
from vtoken.kernels.compiler import machine_id
from vtoken.linear.base import Holding, LinearKernel, LinearShape, PreparedLinear


class PlainLinear(PreparedLinear):
    """`F.linear` on the weight as it is."""

    has_rows = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class TorchKernel(LinearKernel):
    """torch's own path, which takes any dtype and needs no packing."""

    name = "torch"
    holding: ClassVar[Holding] = "f32"  # or the checkpoint's own 16-bit dtype: as it is

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, shape: LinearShape) -> str | None:
        return None

    def keeps_exactly(self, shape: LinearShape) -> bool:
        return True

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        return PlainLinear(weight, bias)


class PackedLinear(PreparedLinear):
    """An operation of torch's on a weight in a form that only it knows."""

    def __init__(self, weight: Tensor, operation: Any, packed: Any, nbytes: int) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = nbytes
        self._operation, self._packed = operation, packed

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):  # not every one of these operations takes nothing for an answer
            return x.new_empty(0, self.out_features)
        out: Tensor = self._operation(x, self._packed)
        return out


class OneDNNKernel(LinearKernel):
    """oneDNN's float32 product on a weight laid out for it."""

    name = "onednn"
    holding: ClassVar[Holding] = "f32"

    def unavailable(self) -> str | None:
        mkldnn: Any = torch.backends.mkldnn
        return None if mkldnn.is_available() else "torch was built without oneDNN"

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        ops: Any = torch.ops.mkldnn
        packed = ops._reorder_linear_weight(weight.contiguous(), None)
        bias = None if bias is None else bias.contiguous()

        def operation(x: Tensor, packed: Tensor) -> Any:
            return ops._linear_pointwise(x, packed, bias, "none", [], "")

        return PackedLinear(weight, operation, packed, weight.nbytes)


def _without_fbgemm() -> str | None:
    return None if "fbgemm" in torch.backends.quantized.supported_engines else "torch was built without fbgemm"


class FbgemmFp16Kernel(LinearKernel):
    """fbgemm with fp16-held weights and float32 maths."""

    name = "fbgemm_fp16"
    holding: ClassVar[Holding] = "f16"

    def unavailable(self) -> str | None:
        return _without_fbgemm()

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        ops: Any = torch.ops.quantized
        packed = ops.linear_prepack_fp16(weight.contiguous(), bias)
        return PackedLinear(weight, ops.linear_dynamic_fp16, packed, 2 * weight.numel())


def check_finite(weight: Tensor) -> None:
    """Raise ConfigError unless int8 can hold the weight."""
    if not torch.isfinite(weight).all():
        raise ConfigError(
            f"the weight of a linear layer {weight.shape[1]} -> {weight.shape[0]} has infinite or undefined numbers, "
            "which int8 cannot hold; leave quantization='int8' out"
        )


class FbgemmInt8Kernel(LinearKernel):
    """fbgemm with int8 weights, a scale for each output, and activations quantised by the tensor.

    All rows of a call share one scale: a row with large numbers costs the others precision, and neighbours show.
    """

    name = "fbgemm_int8"
    holding: ClassVar[Holding] = "int8"
    last_resort = True  # on the demo model 54 to 74 % of the likeliest tokens stay what they were; ours keep 95 %

    def unavailable(self) -> str | None:
        return _without_fbgemm()

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        check_finite(weight)
        ops: Any = torch.ops.quantized
        scales = weight.abs().amax(dim=1).double().div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():  # that torch may drop this some day is our business, not the user's
            warnings.simplefilter("ignore", UserWarning)
            packed = ops.linear_prepack(torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), bias)
        # Without VNNI, sums of two products saturate at 16 bits, so activations get 7 bits.
        reduce_range = "vnni" not in machine_id()

        def operation(x: Tensor, packed: Any) -> Any:
            return ops.linear_dynamic(x, packed, reduce_range)

        return PackedLinear(weight, operation, packed, weight.numel() + 12 * len(weight))
