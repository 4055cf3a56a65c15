"""Encode and decode keys and values.

Plain formats round each number. Scaled formats take the largest magnitude of a token's head onto the largest code:
`scale = absmax / 127` (int8) or `absmax / 448` (fp8_e4m3), `code = round(x / scale)`, decoded as `code * scale`. So

- int8 is off by at most `absmax / 254`, fp8 by at most 1/16 of the number itself or, where that is more,
  `absmax / 2**18`;
- a head of zeros has scale 0 and decodes to zeros;
- a head that holds a NaN or an infinity has scale NaN and decodes to NaN throughout: a fault is never hidden, and it
  stays in its token and head.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from vtoken.base.kv_format import KVFormat

# fp8 lies as bytes, since torch indexes and copies those everywhere; `view` gives it its meaning.
STORAGE: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.uint8,
    "int8": torch.int8,
}
LARGEST_CODE: Final = {"fp8_e4m3": 448.0, "int8": 127.0}


def encode(form: KVFormat, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x [..., head_dim] -> cells [..., head_dim] in `STORAGE[form.name]`, scales float32 [...] or None."""
    if not form.has_scales:
        return x.to(STORAGE[form.name]), None
    x = x.float()
    peak = x.abs().amax(dim=-1)  # NaN if any is NaN
    scales = torch.where(peak.isinf(), torch.nan, peak / LARGEST_CODE[form.name])
    # A subnormal peak may leave a scale of zero; its numbers are then too small to matter and become zeros.
    codes = torch.nan_to_num(x / scales[..., None], nan=0.0, posinf=0.0, neginf=0.0)
    if form.name == "int8":
        return codes.round_().clamp_(-127, 127).to(torch.int8), scales
    return codes.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8), scales


def decode(form: KVFormat, cells: Tensor, scales: Tensor | None) -> Tensor:
    """The inverse of `encode`: float32 [..., head_dim]."""
    if form.name == "fp8_e4m3":
        cells = cells.view(torch.float8_e4m3fn)
    x = cells.float()
    return x if scales is None else x * scales[..., None]
