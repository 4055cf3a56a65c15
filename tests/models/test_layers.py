"""The promise of the reference kernels: a row's bits depend on that row alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vtoken.kernels.fused import ACTIVATIONS
from vtoken.models.kernels import (
    BATCH_INVARIANT,
    even_tile_rows,
    norm_heads,
    rowwise_activate,
    rowwise_activate_and_mul,
    soft_cap,
    tiled_linear,
)
from vtoken.models.layers import LayerNorm, RMSNorm
from vtoken.models.rope import RopeParameters, RotaryEmbedding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# in, out: SmolLM2's projections, and sizes that no SIMD width divides.
WIDTHS = [(576, 960), (576, 1536), (1536, 576), (64, 48), (33, 100), (100, 33), (7, 3), (1, 1)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_stand_alone(compute: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> None:
    """Some rows alone, and each among 1 to 90 others at the start, in the middle and at the end."""
    rows = random(3, width, dtype=dtype, seed=1)
    alone = [compute(row[None].clone())[0] for row in rows]
    for num_others in (1, 31, 47, 90):
        others = random(num_others, width, dtype=dtype, seed=num_others)
        for place in {0, 1, num_others // 2, num_others}:
            # One flat buffer at an odd offset: rows then start anywhere in memory.
            batch = torch.cat([others[:place], rows, others[place:]])
            shifted = torch.cat([batch.new_zeros(1), batch.flatten()])[1:].view_as(batch)
            for computed in (compute(batch), compute(shifted)):
                for i, expected in enumerate(alone):
                    assert torch.equal(computed[place + i], expected), (num_others, place, i)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "out"), WIDTHS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_rows_stand_alone(width: int, out: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight = random(out, width, dtype=dtype, seed=2)
    bias = random(out, dtype=dtype, seed=3) if has_bias else None
    assert_rows_stand_alone(lambda x: tiled_linear(x, weight, bias), width, dtype)


def test_head_rows_stand_alone() -> None:
    weight = random(49152, 576, seed=2)  # SmolLM2's
    assert_rows_stand_alone(lambda x: tiled_linear(x, weight), 576, torch.float32)


@pytest.mark.parametrize(("instructions", "num_threads"), [("AVX2", 1), ("AVX2", 2), ("AVX2", 3), ("SSE4_2", 2)])
def test_linear_rows_stand_alone_on_lesser_machines(instructions: str, num_threads: int) -> None:
    """MKL can be told to use the code of an older processor, where 32 rows are not alike."""
    code = """
import torch
from tests.models.test_layers import assert_rows_stand_alone, random
from vtoken.kernels.fused import ACTIVATIONS
from vtoken.models.kernels import tiled_linear
for width, out in [(576, 960), (33, 100), (64, 258), (7, 3)]:
    weight, bias = random(out, width, seed=2), random(out, seed=3)
    assert_rows_stand_alone(lambda x: tiled_linear(x, weight), width, torch.float32)
    assert_rows_stand_alone(lambda x: tiled_linear(x, weight, bias), width, torch.float32)
"""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MKL_ENABLE_INSTRUCTIONS": instructions,
        "OMP_NUM_THREADS": str(num_threads),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tiles_shrink_until_their_rows_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear_with_another_kernel_for_the_rest(group: int) -> Callable[..., Tensor]:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            even = len(x) // group * group
            return torch.cat([x[:even] @ weight.T, (x[even:].double() @ weight.T.double()).float()])

        return linear

    def chosen() -> int:
        even_tile_rows.cache_clear()
        return even_tile_rows(64, 48, torch.float32, False, 1)

    for group, expected in ((16, 48), (32, 32), (5, 1)):
        monkeypatch.setattr(F, "linear", linear_with_another_kernel_for_the_rest(group))
        assert chosen() == expected
    even_tile_rows.cache_clear()


@pytest.mark.parametrize("num_rows", [0, 1, 31, 32, 33, 64, 100])
def test_linear_is_linear(num_rows: int) -> None:
    x, weight, bias = random(num_rows, 40), random(24, 40, seed=2), random(24, seed=3)
    torch.testing.assert_close(tiled_linear(x, weight, bias), F.linear(x, weight, bias))


def test_a_broken_neighbour_does_not_spread() -> None:
    weight, row = random(24, 40), random(1, 40, seed=1)
    batch = torch.cat([row, torch.full((1, 40), torch.nan), torch.full((1, 40), torch.inf)])
    assert torch.equal(tiled_linear(batch, weight)[0], tiled_linear(row, weight)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 33, 48, 100, 576, 1000])
def test_activation_and_norm_rows_stand_alone(width: int, dtype: torch.dtype) -> None:
    for activation in ACTIVATIONS:
        assert_rows_stand_alone(partial(rowwise_activate_and_mul, activation=activation), 2 * width, dtype)
        assert_rows_stand_alone(lambda x, a=activation: rowwise_activate(x.clone(), a), width, dtype)  # type: ignore[misc]
    assert_rows_stand_alone(lambda x: soft_cap(x.clone(), 1.5), width, dtype)
    layer_norm = LayerNorm(width, 1e-5, dtype=dtype, kernels=BATCH_INVARIANT)
    for parameter in layer_norm.parameters():
        parameter.data.copy_(random(width, dtype=dtype, seed=5))
    assert_rows_stand_alone(layer_norm, width, dtype)
    norm = RMSNorm(width, 1e-6, dtype=dtype, kernels=BATCH_INVARIANT)
    norm.weight.data.copy_(random(width, dtype=dtype, seed=4))
    assert_rows_stand_alone(norm, width, dtype)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("width", [100, 1000])
def test_silu_rows_stand_alone_where_threads_meet(width: int, num_threads: int) -> None:
    """Threads cut a large tensor in the middle of a row, so every row is looked at."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        gate_up = random(700, 2 * width)
        together = rowwise_activate_and_mul(gate_up, "silu")
        alone = torch.cat([rowwise_activate_and_mul(row[None], "silu") for row in gate_up])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)


def test_the_gate_comes_first() -> None:
    gate, up = random(5, 9), random(5, 9, seed=1)
    torch.testing.assert_close(rowwise_activate_and_mul(torch.cat([gate, up], dim=1), "silu"), F.silu(gate) * up)


def test_a_soft_cap_bends_and_bounds() -> None:
    x = random(3, 100) * 40
    torch.testing.assert_close(soft_cap(x.clone(), 30.0), 30 * torch.tanh(x / 30))


def test_a_float32_weight_multiplies_before_narrow_rounding() -> None:
    """As Gemma's norms do, so a bfloat16 model's `1 + weight` keeps its digits."""
    x, weight = random(4, 64, dtype=torch.bfloat16), 1 + random(64, seed=1) / 100
    expected = F.rms_norm(x.float(), (64,), weight, 1e-6).bfloat16()
    assert torch.equal(BATCH_INVARIANT.add_rms_norm(x, None, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 10, 64, 128])
def test_rows_with_normed_heads_stand_alone(head_dim: int, dtype: torch.dtype) -> None:
    q_weight, k_weight = (random(head_dim, seed=seed).to(dtype) for seed in (1, 2))
    assert_rows_stand_alone(lambda x: norm_heads(x.clone(), q_weight, k_weight, 2, 1e-6), 7 * head_dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 10, 64, 128])
def test_rotated_rows_stand_alone(head_dim: int, dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(RopeParameters(), head_dim, max_positions=5000)

    def rotate(x: Tensor) -> Tensor:
        # The position rides in the first element, so that it moves about with its row.
        rotation = rotary(x[:, 0].float().abs().mul(1000).long())
        return rotation(x.unflatten(1, (3, head_dim))).flatten(1)

    assert_rows_stand_alone(rotate, 3 * head_dim, dtype)
