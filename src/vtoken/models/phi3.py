"""Phi-3, and Phi-4, which is the same (arXiv 2404.14219, 2412.08905)."""

from __future__ import annotations

from vtoken.models.config import CheckpointConfig
from vtoken.models.llama import Build, Llama, read_norm_eps


class Phi3(Llama):
    """`Phi3ForCausalLM`: Llama's layers, fused in the checkpoint already. Part of a head may turn, and in the models
    for long texts by LongRoPE."""

    @staticmethod
    def read_build(config: CheckpointConfig) -> Build:
        return Build(is_fused=True, norm_eps=read_norm_eps(config, default=1e-5))
