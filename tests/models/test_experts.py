"""The mixture of experts by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vtoken.models.experts import Experts, SparseMLP
from vtoken.models.kernels import BATCH_INVARIANT, COMPILED, Kernels
from vtoken.models.layers import GatedMLP


@pytest.fixture
def make() -> Callable[..., SparseMLP]:
    def make(
        hidden_size: int = 60,
        num_experts: int = 5,
        top_k: int = 2,
        renormalise: bool = True,
        kernels: Kernels = BATCH_INVARIANT,
        dtype: torch.dtype = torch.float32,
    ) -> SparseMLP:
        of = Experts(number=num_experts, top_k=top_k, width=53, renormalise=renormalise)
        made = SparseMLP(hidden_size, of, dtype=dtype, kernels=kernels)
        generator = torch.Generator().manual_seed(0)
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
        return made

    return make


def plainly(mlp: SparseMLP, x: Tensor, *, renormalise: bool) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for token in x:
        likelihood = F.softmax(F.linear(token, mlp.gate.weight), dim=-1)
        best = likelihood.argsort(descending=True)[: mlp.of.top_k].tolist()
        total = sum(likelihood[i] for i in best) if renormalise else 1
        out = torch.zeros_like(token)
        for i in best:
            expert = mlp.experts[i]
            gate, up = F.linear(token, expert.gate_up_proj.weight).chunk(2)
            out += likelihood[i] / total * F.linear(F.silu(gate) * up, expert.down_proj.weight)
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("kernels", [BATCH_INVARIANT, COMPILED], ids=["invariant", "compiled"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_each_token_goes_through_its_likeliest_experts(
    make: Callable[..., SparseMLP], top_k: int, renormalise: bool, kernels: Kernels
) -> None:
    mlp, x = make(top_k=top_k, renormalise=renormalise, kernels=kernels), torch.randn(17, 60)
    torch.testing.assert_close(mlp(x), plainly(mlp, x, renormalise=renormalise), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("hidden_size", "num_experts", "top_k"), [(60, 5, 2), (64, 8, 2), (33, 17, 4)])
def test_a_token_does_not_feel_the_batch(
    make: Callable[..., SparseMLP], hidden_size: int, num_experts: int, top_k: int
) -> None:
    mlp, x = make(hidden_size, num_experts, top_k), torch.randn(70, hidden_size)
    alone = torch.cat([mlp(row[None]) for row in x])
    for begin, end in [(0, 70), (1, 34), (7, 12), (3, 5), (69, 70)]:
        assert torch.equal(mlp(x[begin:end].clone()), alone[begin:end])


def test_only_the_experts_that_are_used_run(make: Callable[..., SparseMLP], monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for each of them, over its own tokens."""
    mlp = make(num_experts=17, top_k=2)
    rows: list[int] = []
    plain = GatedMLP.forward

    def counting(self: GatedMLP, x: Tensor) -> Tensor:
        rows.append(len(x))
        return plain(self, x)

    monkeypatch.setattr(GatedMLP, "__call__", counting)
    mlp(torch.randn(1, 60))
    assert rows == [1, 1]
    rows.clear()
    mlp(torch.randn(1, 60).expand(30, 60).contiguous())
    assert rows == [30, 30]
    rows.clear()
    mlp(torch.randn(40, 60))
    assert sum(rows) == 80
    assert len(rows) <= 17


def test_no_tokens_are_no_work(make: Callable[..., SparseMLP]) -> None:
    assert make()(torch.zeros(0, 60)).shape == (0, 60)


def test_narrow_types_stay_what_they_are(make: Callable[..., SparseMLP]) -> None:
    exact, narrow, x = make(), make(dtype=torch.bfloat16), torch.randn(20, 60)
    found = narrow(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact(x)).abs().median() < 0.05 * exact(x).std()


def test_operations_are_counted_for_the_experts_of_a_token(make: Callable[..., SparseMLP]) -> None:
    assert make(num_experts=5, top_k=2).flops_per_token == 2 * (60 * 5 + 2 * 3 * 60 * 53)
