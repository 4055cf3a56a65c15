"""Qwen 2 and Qwen 3: Llama's layers with biases or norms on queries and keys, or with experts (arXiv 2407.10671,
2505.09388).

Which layers have a window, the config says in Qwen's own way: see `config.read_model_spec`.
"""

from __future__ import annotations

from dataclasses import replace

from vtoken.models.config import CheckpointConfig
from vtoken.models.experts import Experts, read_choice
from vtoken.models.llama import Build, Llama, read_norm_eps


class Qwen2(Llama):
    """`Qwen2ForCausalLM`: queries, keys and values have biases, and nothing else has."""

    @staticmethod
    def read_build(config: CheckpointConfig) -> Build:
        return Build(qkv_bias=True, norm_eps=read_norm_eps(config))


class Qwen3(Llama):
    """`Qwen3ForCausalLM`: each query and each key goes through a norm before it is turned."""

    @staticmethod
    def read_build(config: CheckpointConfig) -> Build:
        bias = config.flag("attention_bias", default=False)
        return Build(qkv_bias=bias, o_bias=bias, norms_heads=True, norm_eps=read_norm_eps(config))


class Qwen3Moe(Qwen3):
    """`Qwen3MoeForCausalLM`: every `decoder_sparse_step`-th layer has experts, `mlp_only_layers` aside."""

    @staticmethod
    def read_build(config: CheckpointConfig) -> Build:
        # transformers 5 writes the name that its families share.
        key = "num_experts" if config.says("num_experts") else "num_local_experts"
        number, top_k = read_choice(config, key, number=128, top_k=8)
        experts = Experts(
            number=number,
            top_k=top_k,
            width=config.integer("moe_intermediate_size", default=768),
            renormalise=config.flag("norm_topk_prob", default=False),
        )
        step, layers = config.integer("decoder_sparse_step", default=1), range(config.integer("num_hidden_layers"))
        dense = frozenset(config.integers("mlp_only_layers")) | {i for i in layers if (i + 1) % step}
        return replace(Qwen3.read_build(config), experts=experts, dense_layers=dense)
