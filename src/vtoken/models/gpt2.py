"""GPT-2 (Radford et al. 2019): learned positions, layer norms, matrices stored as [in, out]."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from vtoken.attention.spec import AttentionSpec
from vtoken.base.errors import CheckpointError
from vtoken.models.activations import read_activation
from vtoken.models.base import Attend, WeightTarget
from vtoken.models.config import CheckpointConfig, read_model_spec
from vtoken.models.decoder import DecoderLM
from vtoken.models.kernels import BATCH_INVARIANT, Kernels
from vtoken.models.layers import MLP, Embedding, LayerNorm, Linear
from vtoken.models.spec import ModelSpec

# Causal masks that old versions of transformers stored beside the weights.
_MASKS: Final = re.compile(r"\.attn\.(masked_)?bias$")
# The public checkpoints were saved from the model without its head, so their names have no `transformer.`.
_WITHOUT_PREFIX: Final = re.compile(r"(wte|wpe|h|ln_f)\.")


class GPT2Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: CheckpointConfig, spec: ModelSpec, layer: int, dtype: torch.dtype, kernels: Kernels):
        super().__init__()
        self.layer = layer
        width, eps = spec.hidden_size, _norm_eps(config)
        self.ln_1 = LayerNorm(width, eps, dtype=dtype, kernels=kernels)
        self.c_attn = Linear(width, 3 * width, bias=True, dtype=dtype, kernels=kernels)
        self.c_proj = Linear(width, width, bias=True, dtype=dtype, kernels=kernels)
        self.ln_2 = LayerNorm(width, eps, dtype=dtype, kernels=kernels)
        self.mlp = MLP(
            width,
            config.integer("n_inner", default=4 * width),
            activation=read_activation(config, "activation_function", default="gelu_new"),
            bias=True,
            dtype=dtype,
            kernels=kernels,
        )

    def forward(self, residual: Tensor, x: Tensor | None, attend: Attend) -> Tensor:
        """Add x, what the layer before returned, to the residual; return what is to be added next. [T, hidden] each."""
        attended = attend(self.layer, self.c_attn(self.ln_1(residual, x)))
        out: Tensor = self.mlp(self.ln_2(residual, self.c_proj(attended)))
        return out

    __call__ = forward

    def weight_map(self, prefix: str) -> dict[str, WeightTarget]:
        return {
            **self.ln_1.weight_map(f"{prefix}.ln_1"),
            **self.c_attn.weight_map(f"{prefix}.attn.c_attn", transposed=True),
            **self.c_proj.weight_map(f"{prefix}.attn.c_proj", transposed=True),
            **self.ln_2.weight_map(f"{prefix}.ln_2"),
            **self.mlp.up_proj.weight_map(f"{prefix}.mlp.c_fc", transposed=True),
            **self.mlp.down_proj.weight_map(f"{prefix}.mlp.c_proj", transposed=True),
        }


class GPT2(DecoderLM):
    """`GPT2LMHeadModel` checkpoints."""

    embedding_name: ClassVar[str] = "transformer.wte"

    def __init__(self, config: CheckpointConfig, dtype: torch.dtype, kernels: Kernels = BATCH_INVARIANT) -> None:
        """Make the model with weights still unset. Raises CheckpointError where `config` asks for what we lack."""
        super().__init__()
        if config.flag("add_cross_attention", default=False):
            raise CheckpointError(
                f"{config.path}: add_cross_attention is true, but attention to another model's output is not supported"
            )
        spec = read_model_spec(config, is_rotary=False)
        self.spec = replace(spec, layers=tuple(_attention(config, spec, layer) for layer in range(spec.num_layers)))
        self._make_ends(
            spec.hidden_size, is_tied=config.flag("tie_word_embeddings", default=True), dtype=dtype, kernels=kernels
        )
        self.embed_positions = Embedding(spec.max_position_embeddings, spec.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(GPT2Layer(config, spec, i, dtype, kernels) for i in range(spec.num_layers))
        self.norm = LayerNorm(spec.hidden_size, _norm_eps(config), dtype=dtype, kernels=kernels)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(token_ids).add_(self.embed_positions(positions))

    def decode(self, x: Tensor, attend: Attend) -> Tensor:
        residual, added = x, None
        for layer in self.layers:
            added = layer(residual, added, attend)
        return self.norm(residual, added)

    def weight_map(self) -> dict[str, WeightTarget]:
        targets = {
            **self.embed_tokens.weight_map("transformer.wte"),
            **self.embed_positions.weight_map("transformer.wpe"),
            **self.norm.weight_map("transformer.ln_f"),
        }
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, GPT2Layer)
            targets |= layer.weight_map(f"transformer.h.{i}")
        return targets if self.is_tied else targets | self.lm_head.weight_map("lm_head")

    def weight_name(self, stored: str) -> str | None:
        if _MASKS.search(stored):
            return None
        return f"transformer.{stored}" if _WITHOUT_PREFIX.match(stored) else stored


def _attention(config: CheckpointConfig, spec: ModelSpec, layer: int) -> AttentionSpec:
    """`reorder_and_upcast_attn` asks for what is done anyway: attention computes in float32."""
    scale = spec.head_dim**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
    if config.flag("scale_attn_by_inverse_layer_idx", default=False):
        scale /= layer + 1
    return AttentionSpec(scale, rotation=None)


def _norm_eps(config: CheckpointConfig) -> float:
    return config.number("layer_norm_epsilon", default=1e-5, maximum=1.0)
