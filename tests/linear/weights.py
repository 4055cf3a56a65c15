"""Random weights that a given holding keeps exactly, and what this processor can run."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def random_weight(out_features: int, in_features: int, holding: str, seed: int = 0) -> Tensor:
    """Float32 [out, in]; g8 and g4 need whole groups of 32."""
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))
    if holding == "f16":
        return weight.half().float()
    if holding == "bf16":
        return weight.bfloat16().float()
    if holding not in ("g8", "g4"):
        return weight
    groups = weight.view(-1, GROUP)
    if holding == "g8":  # Q8_0
        scale = (groups.abs().amax(1, keepdim=True) / 127).half().float()
        codes = (groups / scale).round().clamp(-127, 127)
        return (codes * scale).view_as(weight)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)  # Q4_1
    scale, offset = ((high - low) / 15).half().float(), low.half().float()
    codes = ((groups - offset) / scale).round().clamp(0, 15)
    return (codes * scale + offset).view_as(weight)


def q4_0_weight(out_features: int, in_features: int) -> Tensor:
    """Q4_0: the number of the largest size in a group gets code -8, whatever its sign."""
    groups = torch.randn(out_features * in_features // GROUP, GROUP, generator=torch.Generator().manual_seed(1))
    extreme = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scale = (extreme / -8).half().float()
    return ((groups / scale).round().clamp(-8, 7) * scale).view(out_features, in_features)
