"""Mixtral: Mistral with a mixture of experts in the place of its MLPs (arXiv 2401.04088)."""

from __future__ import annotations

from vtoken.models.config import CheckpointConfig
from vtoken.models.experts import Experts, read_choice
from vtoken.models.llama import Build, Llama, read_norm_eps


class Mixtral(Llama):
    """`MixtralForCausalLM`."""

    @staticmethod
    def read_build(config: CheckpointConfig) -> Build:
        number, top_k = read_choice(config, "num_local_experts", number=8, top_k=2)
        experts = Experts(
            number=number,
            top_k=top_k,
            width=config.integer("intermediate_size"),
            renormalise=True,
            prefix="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
        )
        return Build(norm_eps=read_norm_eps(config, default=1e-5), experts=experts)
