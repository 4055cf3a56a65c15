"""R5: paged attention over scattered blocks equals contiguous attention within the tolerance of the dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.attention.layer import PLAIN, Text, run
from vtoken.attention.spec import AttentionSpec

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def contiguous(text: Text, dtype: torch.dtype, spec: AttentionSpec) -> torch.Tensor:
    """torch's own attention over one contiguous stretch of keys and values."""
    q, k, v = (x.to(dtype).transpose(0, 1)[None] for x in (text.q, text.k, text.v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [4, 16, 48])
@pytest.mark.parametrize("cuts", [[], [5, 100, 101, 102], range(60, 150)], ids=["prompt", "chunks", "decode"])
def test_scattered_equals_contiguous(dtype: torch.dtype, block_size: int, cuts: list[int]) -> None:
    text = Text.random(150)
    paged, _ = run(text, block_size=block_size, dtype=dtype, cuts=cuts, scatter=True, neighbours=2, seed=block_size)
    assert paged.dtype == dtype
    torch.testing.assert_close(paged, contiguous(text, dtype, PLAIN), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
