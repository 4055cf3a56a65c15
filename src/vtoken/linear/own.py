"""Our compiled kernels, one for each way to hold weights."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from torch import Tensor

from vtoken.base.errors import ConfigError
from vtoken.kernels.compiler import KernelsUnavailable
from vtoken.kernels.gemm import GROUP, PackedWeight
from vtoken.kernels.library import library
from vtoken.linear.base import Holding, LinearKernel, LinearShape, PreparedLinear
from vtoken.linear.from_torch import check_finite


@cache
def without_kernels() -> str | None:
    """Why there are no compiled kernels here, None if there are."""
    try:
        library()
    except KernelsUnavailable as error:
        return str(error)
    return None


class OwnLinear(PreparedLinear):
    """A packed weight; the weight that it was made from is not needed any more."""

    has_rows = True
    is_recordable = True

    def __init__(self, weight: Tensor, bias: Tensor | None, holding: Holding) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = PackedWeight(weight, holding)
        self._bias = None if bias is None else bias.contiguous()
        self.nbytes = self._packed.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._packed.multiply(x, self._bias)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """`out += self(x)` in one pass, as a residual needs it: out [T, out_features]."""
        self._packed.multiply(x, self._bias, out)

    def rows(self, ids: Tensor) -> Tensor:
        return self._packed.rows(ids)


class OwnKernel(LinearKernel):
    """Float32 maths on weights widened in registers: all holdings that keep a weight give the very same results."""

    batch_invariant = True

    def unavailable(self) -> str | None:
        return without_kernels()

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        try:
            return OwnLinear(weight, bias, self.holding)
        except ValueError as error:
            layer = f"{weight.shape[1]} -> {weight.shape[0]}"
            raise ConfigError(f"{self.name} cannot hold a linear layer {layer}: {error}") from error


class VtokenF32(OwnKernel):
    """Weights as they are."""

    name = "vtoken_f32"
    holding: ClassVar[Holding] = "f32"


class VtokenF16(OwnKernel):
    """Weights rounded to fp16, once."""

    name = "vtoken_f16"
    holding: ClassVar[Holding] = "f16"


class VtokenBF16(OwnKernel):
    """Weights rounded to bf16, once."""

    name = "vtoken_bf16"
    holding: ClassVar[Holding] = "bf16"


class _Grouped(OwnKernel):
    """Codes and scales as the checkpoint was quantised: only for weights that are exactly of that form."""

    def unsupported(self, shape: LinearShape) -> str | None:
        reason = super().unsupported(shape)
        if reason is None and self.holding not in shape.exact:
            reason = f"holds only weights that are {self.holding} codes in groups of {GROUP}, and these are not"
        return reason


class VtokenG8(_Grouped):
    """8-bit codes with an fp16 scale for 32 weights (GGUF Q8_0)."""

    name = "vtoken_g8"
    holding: ClassVar[Holding] = "g8"


class VtokenG4(_Grouped):
    """4-bit codes with an fp16 scale and offset for 32 weights (GGUF Q4_0 and Q4_1)."""

    name = "vtoken_g4"
    holding: ClassVar[Holding] = "g4"


class VtokenInt8(OwnKernel):
    """Weights and activations as 8-bit codes with a scale for 32 numbers along `in`, each row by its own numbers.

    A weight that is of this form already (g8) does not change. Infinite or undefined activations make their row NaN.
    """

    name = "vtoken_int8"
    holding: ClassVar[Holding] = "int8"

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        check_finite(weight)
        return super().prepare(weight, bias)
