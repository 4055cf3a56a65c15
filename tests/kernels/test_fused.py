"""The small compiled operations against plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vtoken.attention.cpu import CpuAttention
from vtoken.attention.reference import ReferenceAttention
from vtoken.attention.rotation import Rotation
from vtoken.base.kv_format import KV_FORMATS
from vtoken.kernels import fused
from vtoken.models.kernels import add_layer_norm, add_rms_norm, norm_heads
from vtoken.planner.kv_memory import KVShape
from vtoken.worker.kv_store import KVStore

EXPECTED: dict[fused.Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 7), (5, 16), (2, 33), (70, 576)])
class TestOnePass:
    def test_norm(self, rows: int, width: int) -> None:
        residual, weight = random(rows, width), random(width, seed=1)
        expected = F.rms_norm(residual, (width,), weight, 1e-5)
        torch.testing.assert_close(fused.add_rms_norm(residual, None, weight, 1e-5), expected, atol=1e-5, rtol=1e-5)

    def test_norm_of_a_sum(self, rows: int, width: int) -> None:
        residual, x, weight = random(rows, width), random(rows, width, seed=1), random(width, seed=2)
        ours, theirs = residual.clone(), residual.clone()
        found, expected = (norm(r, x, weight, 1e-6) for norm, r in ((fused.add_rms_norm, ours), (add_rms_norm, theirs)))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(ours, residual + x), "the sum stays in the residual"
        assert torch.equal(theirs, ours)

    @pytest.mark.parametrize("weights", ["both", "weight", "none"])
    def test_layer_norm_of_a_sum(self, weights: str, rows: int, width: int) -> None:
        residual, x = 3 + random(rows, width), random(rows, width, seed=1)
        weight = None if weights == "none" else random(width, seed=2)
        bias = random(width, seed=3) if weights == "both" else None
        expected = F.layer_norm(residual + x, (width,), weight, bias, 1e-5)
        for norm in (fused.add_layer_norm, add_layer_norm):
            ours = residual.clone()
            torch.testing.assert_close(norm(ours, x, weight, bias, 1e-5), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(ours, residual + x), "the sum stays in the residual"
            lone = norm(ours, None, weight, bias, 1e-5)
            torch.testing.assert_close(lone, expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("activation", fused.ACTIVATIONS)
    def test_activations(self, activation: fused.Activation, rows: int, width: int) -> None:
        x, up = 6 * random(rows, width), random(rows, width, seed=1)
        expected = EXPECTED[activation](x.double()).float()  # torch's own gelu in float32 is no nearer
        found = fused.activate_and_mul(torch.cat([x, up], dim=1), activation)
        torch.testing.assert_close(found, expected * up, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(fused.activate(x, activation), expected, atol=2e-6, rtol=1e-5)

    def test_rows_stand_alone(self, rows: int, width: int) -> None:
        x, weight = random(rows, 2 * width), random(2 * width, seed=1)
        operations: list[Callable[[Tensor], Tensor]] = [
            lambda x: fused.add_rms_norm(x, None, weight, 1e-6),
            lambda x: fused.add_layer_norm(x, None, weight, weight, 1e-6),
            *(partial(fused.activate_and_mul, activation=activation) for activation in fused.ACTIVATIONS),
            *(partial(fused.activate, activation=activation) for activation in fused.ACTIVATIONS),
        ]
        for operation in operations:
            together = operation(x.clone())
            assert all(torch.equal(together[i : i + 1], operation(row[None].clone())) for i, row in enumerate(x))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (9, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [1, 7, 16, 33, 128])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 70])
def test_norms_of_heads(num_tokens: int, head_dim: int, heads: tuple[int, int]) -> None:
    """Queries and keys each by themselves, values left alone; as torch, and a token as it is alone."""
    num_heads, num_kv_heads = heads
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    q_weight, k_weight = random(head_dim, seed=1), random(head_dim, seed=2)
    plain = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = plain.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    normed = [F.rms_norm(part, (head_dim,), weight, 1e-5) for part, weight in ((q, q_weight), (k, k_weight))]
    expected = torch.cat([*normed, v], dim=1).flatten(1)
    for norm in (fused.norm_heads, norm_heads):
        found = norm(qkv.clone(), q_weight, k_weight, num_kv_heads, 1e-5)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for i, row in enumerate(qkv):
            assert torch.equal(norm(row[None].clone(), q_weight, k_weight, num_kv_heads, 1e-5)[0], found[i])


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -torch.inf, 1e38, -100.0, 100.0, 1e-40])
def test_odd_numbers(value: float) -> None:
    """As in torch, and in their own row only."""
    gate_up = torch.cat([torch.full((1, 40), value), random(1, 40)])
    for activation, function in EXPECTED.items():
        expected = function(gate_up[:, :20]) * gate_up[:, 20:]
        found = fused.activate_and_mul(gate_up, activation)
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-5, rtol=1e-5)
    weight = torch.ones(40)
    for found, expected in (
        (fused.add_rms_norm(gate_up, None, weight, 1e-6), add_rms_norm(gate_up, None, weight, 1e-6)),
        (
            fused.add_layer_norm(gate_up[1:], None, weight, weight, 1e-6),
            F.layer_norm(gate_up[1:], (40,), weight, weight, 1e-6),
        ),
    ):
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-5, rtol=1e-5)


BOTH = list(itertools.product(KV_FORMATS, KV_FORMATS))


def written(
    backend: ReferenceAttention | CpuAttention,
    x: Tensor,
    rotation: Rotation | None,
    form: tuple[str, str],
    slots: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Heads as attention gets them, and the store's tensors, after 4 query and 2 KV heads were written."""
    store = KVStore(KVShape(1, 2, x.shape[1] // 8, *form), 6, 5)
    for tensor in store.tensors:
        tensor.zero_()
    heads = backend.write(x.clone(), rotation, store.layers[0], slots)
    return [head.float() for head in heads], list(store.tensors)


def assert_same_write(x: Tensor, rotation: Rotation | None, form: tuple[str, str], slots: Tensor) -> None:
    theirs, stored_there = written(ReferenceAttention(), x, rotation, form, slots)
    ours, stored_here = written(CpuAttention(), x, rotation, form, slots)
    # A rotation's last bit may differ, and then a code by one: so close, and mostly equal.
    widest = max(float(x.nan_to_num(0, 0, 0).abs().max()), 1e-30)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, atol=widest / 7, rtol=1e-5)
        same = (found - expected).abs() < 1e-5 * widest
        assert (same | found.isnan() | found.isinf()).float().mean() > 0.97
    for found, expected in zip(stored_here, stored_there, strict=True):
        if not found.is_floating_point():
            assert (found == expected).float().mean() > 0.97


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("form", BOTH, ids="-".join)
@pytest.mark.parametrize("turned", [None, 16, 6])
def test_rotate_and_write(form: tuple[str, str], turned: int | None) -> None:
    x, slots = random(9, 8 * 16), torch.randperm(30, generator=torch.Generator().manual_seed(0))[:9]
    angles = random(9, (turned or 0) // 2, seed=1) * 100
    assert_same_write(x, Rotation(angles.cos(), angles.sin()) if turned else None, form, slots)


@pytest.mark.parametrize("form", KV_FORMATS)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.zero_(),
        lambda x: x[0].zero_(),
        lambda x: x[1].mul_(1000),
        lambda x: x[0, 3].mul_(1000),
        lambda x: x[1, 70].fill_(torch.nan),
        lambda x: x[1, 70].fill_(torch.inf),
        lambda x: x.mul_(1e-40),
        lambda x: x.mul_(1e5),
        lambda x: x.mul_(1e37),
    ],
)
def test_what_is_hard_to_hold(form: str, spoil: Callable[[Tensor], object]) -> None:
    x = random(3, 8 * 12)
    spoil(x)
    assert_same_write(x, None, (form, form), torch.tensor([3, 29, 0]))


@given(st.lists(st.floats(width=32), min_size=16, max_size=16), st.sampled_from(list(KV_FORMATS)))
def test_any_numbers_are_coded_alike(numbers: list[float], form: str) -> None:
    """Without a rotation nothing is rounded on the way, so both ways must agree bit for bit."""
    x = torch.tensor(numbers).repeat(8)[None]
    slots = torch.tensor([7])
    theirs, stored_there = written(ReferenceAttention(), x, None, (form, form), slots)
    ours, stored_here = written(CpuAttention(), x, None, (form, form), slots)
    for found, expected in zip(ours + stored_here, theirs + stored_there, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, atol=0, rtol=0)
