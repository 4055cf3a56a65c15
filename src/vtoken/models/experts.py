"""A mixture of experts: each token goes through the few MLPs that a router picks for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vtoken.models.base import WeightTarget
from vtoken.models.kernels import Kernels
from vtoken.models.layers import GatedMLP, Linear


class SparseMLP(nn.Module):
    """The `top_k` likeliest of `num_experts` gated MLPs, weighted by their probabilities (Mixtral, arXiv 2401.04088).

    The tokens of an expert go through it together, so a step costs in proportion to the experts that it uses, each of
    them one product. `renormalise` makes a token's weights add up to one. Which experts run depends on the tokens, so a
    step cannot be recorded and replayed.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalise: bool,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.renormalise = renormalise
        # A rounding here would send tokens to other experts.
        self.gate = Linear(hidden_size, num_experts, bias=False, dtype=dtype, kernels=kernels, is_delicate=True)
        self.experts = nn.ModuleList(
            GatedMLP(hidden_size, intermediate_size, bias=False, dtype=dtype, kernels=kernels)
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.top_k)  # [T, top_k] each
        if self.renormalise:
            weights /= weights.sum(-1, keepdim=True)
        chosen = chosen.flatten()
        # The choices by expert; those of one expert in the order of their tokens.
        order = chosen.argsort(stable=True)
        tokens, weights = order // self.top_k, weights.flatten()[order, None]
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        out = torch.zeros_like(x)
        end = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if not count:
                continue
            begin, end = end, end + count
            rows = tokens[begin:end]
            # A token comes to its experts in their order, whoever else is in the batch: its sum has the same bits.
            out.index_add_(0, rows, (expert(x[rows]) * weights[begin:end]).to(x.dtype))
        return out

    __call__ = forward

    @property
    def flops_per_token(self) -> int:
        """Of the router and of `top_k` experts."""
        return 2 * (_size([self.gate]) + self.top_k * _size(self.experts[0].children()))

    def weight_map(self, gate: str, up: str, down: str) -> dict[str, WeightTarget]:
        """Names below the layer's; `gate`, `up` and `down` are what the checkpoint calls an expert's matrices."""
        names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        targets = self.gate.weight_map("gate")
        for number, expert in enumerate(self.experts):
            assert isinstance(expert, GatedMLP)
            for name, target in expert.weight_map().items():
                matrix, _, kind = name.partition(".")
                targets[f"experts.{number}.{names[matrix]}.{kind}"] = target
        return targets


def _size(matrices: Iterable[nn.Module]) -> int:
    return sum(matrix.in_features * matrix.out_features for matrix in matrices if isinstance(matrix, Linear))
