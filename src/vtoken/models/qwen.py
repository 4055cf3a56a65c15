"""Qwen 2 and Qwen 3: Llama's layers with biases or norms on queries and keys (arXiv 2407.10671, 2505.09388).

Which layers have a window, the config says in Qwen's own way: see `config.read_model_spec`.
"""

from __future__ import annotations

from vtoken.models.config import CheckpointConfig
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
