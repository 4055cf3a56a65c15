"""Linear kernels by name, and the groups of them that a user may name."""

from __future__ import annotations

from typing import Final

from vtoken.base.registry import Registry
from vtoken.linear.base import LinearKernel
from vtoken.linear.from_torch import FbgemmFp16Kernel, FbgemmInt8Kernel, OneDNNKernel, TorchKernel
from vtoken.linear.own import VtokenBF16, VtokenF16, VtokenF32, VtokenG4, VtokenG8, VtokenInt8

KERNELS: Registry[LinearKernel] = Registry("linear backend")
for _kernel in (
    TorchKernel(),
    OneDNNKernel(),
    FbgemmFp16Kernel(),
    FbgemmInt8Kernel(),
    VtokenF32(),
    VtokenF16(),
    VtokenBF16(),
    VtokenG8(),
    VtokenG4(),
    VtokenInt8(),
):
    KERNELS.register(_kernel.name)(_kernel)

# What settings may say: "auto" (all that keep weights exactly), a group, or a kernel.
BACKENDS: Final = ("auto", "vtoken", *KERNELS)
QUANTIZATIONS: Final = ("int8",)
