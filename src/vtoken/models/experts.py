"""A mixture of experts: each token goes through the few MLPs that a router picks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from vtoken.base.errors import CheckpointError
from vtoken.models.base import WeightTarget
from vtoken.models.config import CheckpointConfig
from vtoken.models.kernels import Kernels
from vtoken.models.layers import GatedMLP, Linear, matrix_flops

_MAX_EXPERTS: Final = 10_000  # beyond every real model


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What a family decides about its experts."""

    number: int
    top_k: int  # of them a token goes through
    width: int  # of each, between its matrices
    renormalise: bool  # whether a token's weights are made to add up to one
    # What the checkpoint calls the mixture in a layer, and the matrices of an expert.
    prefix: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def read_choice(config: CheckpointConfig, key: str, *, number: int, top_k: int) -> tuple[int, int]:
    """How many experts there are, under `key`, and through how many of them a token goes; each with its default."""
    number = config.integer(key, default=number, maximum=_MAX_EXPERTS)
    top_k = config.integer("num_experts_per_tok", default=top_k)
    if top_k > number:
        raise CheckpointError(f"{config.path}: num_experts_per_tok ({top_k}) must be at most {key} ({number})")
    return number, top_k


class SparseMLP(nn.Module):
    """The `top_k` likeliest of several gated MLPs, weighted by their probabilities (Mixtral, arXiv 2401.04088).

    The tokens of an expert go through it together, so a step costs in proportion to the experts that it uses, each of
    them one product a matrix. Which experts run depends on the tokens, so a step cannot be recorded and replayed.
    """

    def __init__(self, hidden_size: int, of: Experts, *, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.of = of
        # A rounding here would send tokens to other experts.
        self.gate = Linear(hidden_size, of.number, bias=False, dtype=dtype, kernels=kernels, is_delicate=True)
        self.experts = nn.ModuleList(
            GatedMLP(hidden_size, of.width, bias=False, dtype=dtype, kernels=kernels) for _ in range(of.number)
        )

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.of.top_k)  # [T, top_k] each
        if self.of.renormalise:
            weights /= weights.sum(-1, keepdim=True)
        chosen = chosen.flatten()
        # The choices by expert; those of one expert in the order of their tokens.
        order = chosen.argsort(stable=True)
        tokens, weights = order // self.of.top_k, weights.flatten()[order, None]
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
        """Of the router and of the experts that a token goes through."""
        return matrix_flops(self.gate) + self.of.top_k * matrix_flops(self.experts[0])

    def weight_map(self) -> dict[str, WeightTarget]:
        """Names below the layer's."""
        names = {"gate_proj": self.of.gate, "up_proj": self.of.up, "down_proj": self.of.down}
        targets = self.gate.weight_map(f"{self.of.prefix}.gate")
        for number, expert in enumerate(self.experts):
            assert isinstance(expert, GatedMLP)
            for name, target in expert.weight_map().items():
                matrix, _, kind = name.partition(".")
                targets[f"{self.of.prefix}.experts.{number}.{names[matrix]}.{kind}"] = target
        return targets
