"""Which narrower holdings give a weight back bit for bit."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from vtoken.kernels import gemm
from vtoken.linear.base import Holding, LinearShape
from vtoken.linear.own import without_kernels

HOLDINGS: Final[tuple[Holding, ...]] = ("f32", "f16", "bf16", "g8", "g4")


def exact_holdings(weight: Tensor) -> frozenset[Holding]:
    """The holdings in which no number of the float32 weight [out, in] changes.

    Only exactness counts: with fp16 instead of the demo checkpoint's own weights logits move by 0.07.
    """
    weight = weight.contiguous()
    if without_kernels() is None:
        exact = gemm.exact_holdings(weight)  # looks at every number: once
        return frozenset(holding for holding in HOLDINGS if holding in exact)
    found: set[Holding] = {"f32"}  # what torch's own kernels could use
    if torch.equal(weight.half().float(), weight):
        found.add("f16")
    return frozenset(found)


def shape_of(weight: Tensor, bias: Tensor | None) -> LinearShape:
    """The shape of a layer, its numbers looked at: weight [out, in], bias [out] or None."""
    out_features, in_features = weight.shape
    exact = exact_holdings(weight) if weight.dtype == torch.float32 else frozenset[Holding]()
    return LinearShape(in_features, out_features, bias is not None, weight.dtype, exact)
