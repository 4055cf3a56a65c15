"""What the formats of the cache promise: how wrong a number may get, and what happens to hard ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vtoken.base.kv_format import KV_FORMATS
from vtoken.quant.kv_format import STORAGE, decode, encode

SCALED = [name for name, form in KV_FORMATS.items() if form.has_scales]


def coded(name: str, x: Tensor) -> Tensor:
    return decode(KV_FORMATS[name], *encode(KV_FORMATS[name], x))


def allowed(name: str, x: Tensor) -> Tensor:
    """The largest error of each number, as the docstring of `quant.kv_format` promises it."""
    peak = x.abs().amax(dim=-1, keepdim=True)
    return {
        "float32": torch.zeros_like(x),
        "float16": torch.maximum(x.abs() / 2**11, torch.tensor(2.0**-25)),
        "bfloat16": torch.maximum(x.abs() / 2**8, torch.tensor(1e-38)),
        "fp8_e4m3": torch.maximum(x.abs() / 16, peak / 2**18),
        "int8": (peak / 254).expand_as(x),
    }[name] * (1 + 1e-5)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    form = KV_FORMATS[name]
    cells, scales = encode(form, torch.randn(3, 2, 64))
    assert cells.dtype == STORAGE[name]
    assert cells.nbytes + (0 if scales is None else scales.nbytes) == 3 * 2 * form.bytes_per_head(64)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
@pytest.mark.parametrize("head_dim", [3, 14, 64, 128])
def test_error_bound(name: str, outlier: float, head_dim: int) -> None:
    x = torch.randn(50, 3, head_dim, generator=torch.Generator().manual_seed(head_dim))
    x[:, :, 0] *= outlier
    error = (coded(name, x) - x).abs()
    assert (error <= allowed(name, x)).all()
    if name != "float32":
        assert error.max() > 0, "a bound that nothing comes near proves nothing"


@given(st.lists(st.floats(-60_000, 60_000, width=32), min_size=1, max_size=20))
def test_error_bound_of_any_numbers(numbers: list[float]) -> None:
    x = torch.tensor([numbers])
    for name in KV_FORMATS:
        # Below 1e-30 float32 itself, and so a scale, has lost bits.
        if x.abs().max() < 1e-30:
            continue
        assert ((coded(name, x) - x).abs() <= allowed(name, x)).all(), name


@pytest.mark.parametrize("name", SCALED)
def test_an_outlier_costs_its_own_head_only(name: str) -> None:
    x = torch.randn(2, 2, 64)
    clean = coded(name, x)
    x[1, 0, 5] = 1000.0
    spoiled = coded(name, x)
    others = torch.ones(2, 2, dtype=torch.bool)
    others[1, 0] = False
    assert torch.equal(spoiled[others], clean[others])
    assert abs(spoiled[1, 0, 5] - 1000.0) <= 1000.0 / 16


@pytest.mark.parametrize("name", KV_FORMATS)
def test_zeros_stay_zeros(name: str) -> None:
    x = torch.zeros(2, 8)
    assert torch.equal(coded(name, x), x)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_fault_shows_and_stays_in_its_head(name: str, fault: float) -> None:
    x = torch.randn(3, 8)
    x[1, 4] = fault
    found = coded(name, x)
    assert not found[1].isfinite().all()
    assert found[[0, 2]].isfinite().all()
    if name in SCALED:
        assert found[1].isnan().all()


def test_all_codes_of_fp8_come_back() -> None:
    """Every finite code, at scale 1, is its own nearest."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    numbers = decode(KV_FORMATS["fp8_e4m3"], codes[None], torch.ones(1))
    again, scales = encode(KV_FORMATS["fp8_e4m3"], numbers)
    assert scales is not None
    assert scales.item() == 1.0
    assert torch.equal(again[0], codes)
