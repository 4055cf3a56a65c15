"""`Rotation`: what rotary position embedding does to the queries and keys of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """Turns the first `rotary_dim` elements of every head: element `i` with element `i + rotary_dim / 2`."""

    cos: Tensor  # [T, rotary_dim / 2] float32
    sin: Tensor  # [T, rotary_dim / 2] float32

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, head_dim], turned; float32 inside, the dtype of `x` outside."""
        width = 2 * self.cos.shape[-1]
        first, second = x[..., :width].float().chunk(2, dim=-1)
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
