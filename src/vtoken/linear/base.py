"""What a linear kernel is: it packs a weight once and then multiplies by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor

# How a weight can lie in memory; all but int8 are widened to float32 before they meet an activation.
# f32, f16, bf16: one number a weight. g8: int8 code times an fp16 scale for 32 weights along `in` (GGUF's Q8_0).
# g4: 4-bit code times an fp16 scale plus an fp16 offset for 32 weights along `in` (GGUF's Q4_0 and Q4_1).
# int8: quantised anew, as are the activations.
Holding = Literal["f32", "f16", "bf16", "g8", "g4", "int8"]
BYTES_A_WEIGHT: Final[dict[Holding, float]] = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "g8": 1 + 2 / 32,
    "g4": 1 / 2 + 4 / 32,
    "int8": 1 + 4 / 32,
}


@dataclass(frozen=True)
class LinearShape:
    """What the choice of a kernel depends on: the sizes of a layer, and what its numbers allow."""

    in_features: int
    out_features: int
    has_bias: bool
    dtype: torch.dtype
    exact: frozenset[Holding] = frozenset({"f32"})  # the holdings that give every weight back bit for bit

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def __str__(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


class PreparedLinear(ABC):
    """`x @ weight.T + bias` with the weight as one kernel wants it."""

    in_features: int
    out_features: int
    nbytes: int  # memory held, the weight itself included where it is still needed

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features], both float32 (or the weight's dtype) and contiguous."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, as an embedding needs them: ids [T] -> [T, in_features]. Only where `has_rows`."""
        raise NotImplementedError(f"{type(self).__name__} cannot give rows back")

    has_rows: ClassVar[bool] = False
    is_recordable: ClassVar[bool] = False
    """Whether its calls are launched so that a `kernels.tape.Tape` sees them."""


class LinearKernel(ABC):
    """One way to compute a linear layer.

    `batch_invariant` says that a row's result has the same bits whatever rows stand beside it and whatever their
    number. `last_resort` kernels are taken unasked only where no other one runs. `holding` says how it keeps weights;
    it may be chosen unasked only for shapes whose `exact` has it.
    """

    name: ClassVar[str]
    holding: ClassVar[Holding]
    batch_invariant: ClassVar[bool] = False
    last_resort: ClassVar[bool] = False

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this machine cannot run it, in one line; None if it can."""

    def unsupported(self, shape: LinearShape) -> str | None:
        """Why it cannot compute this shape, in one line; None if it can."""
        return None if shape.dtype == torch.float32 else f"computes float32 only, not {shape.dtype}"

    @property
    def bytes_a_weight(self) -> float:
        return BYTES_A_WEIGHT[self.holding]

    def keeps_exactly(self, shape: LinearShape) -> bool:
        """Whether every weight of the shape is computed with as it is in the checkpoint."""
        return self.holding in shape.exact

    @abstractmethod
    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        """weight [out, in], bias [out] or None. Raises ConfigError for numbers that the kernel cannot hold."""
