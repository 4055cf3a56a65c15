"""OPT (Zhang et al., arXiv 2205.01068): learned positions, layer norms before or behind attention and MLP."""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from vtoken.models.activations import read_activation
from vtoken.models.base import Attend, WeightTarget
from vtoken.models.config import CheckpointConfig, read_model_spec
from vtoken.models.decoder import DecoderLM
from vtoken.models.kernels import BATCH_INVARIANT, Kernels
from vtoken.models.layers import MLP, Embedding, LayerNorm, Linear
from vtoken.models.spec import ModelSpec

# Rows of the position table before that of position 0: OPT was trained with fairseq, where they were for padding.
_FIRST_POSITION: Final = 2
_NORM_EPS: Final = 1e-5  # torch's own; the config has no say


class OPTLayer(nn.Module):
    """Attention and MLP beside a residual, each behind a norm, or (OPT-350m) before one."""

    def __init__(self, config: CheckpointConfig, spec: ModelSpec, layer: int, dtype: torch.dtype, kernels: Kernels):
        super().__init__()
        self.layer = layer
        self.norm_first = config.flag("do_layer_norm_before", default=True)
        bias = config.flag("enable_bias", default=True)
        width = spec.hidden_size
        self.self_attn_layer_norm = _norm(config, width, dtype, kernels)
        self.qkv_proj = Linear(width, 3 * width, bias=bias, dtype=dtype, kernels=kernels)
        self.out_proj = Linear(width, width, bias=bias, dtype=dtype, kernels=kernels)
        self.final_layer_norm = _norm(config, width, dtype, kernels)
        self.mlp = MLP(
            width,
            config.integer("ffn_dim"),
            activation=read_activation(config, "activation_function", default="relu"),
            bias=bias,
            dtype=dtype,
            kernels=kernels,
        )

    def forward(self, residual: Tensor, x: Tensor | None, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """Residual and what is to be added to it, [T, hidden] each, as the layer before left them and as this one does.

        With norms behind, nothing is left to add: the residual is the norm of the sum.
        """
        if self.norm_first:
            attended = self._attend(self.self_attn_layer_norm(residual, x), attend)
            return residual, self.mlp(self.final_layer_norm(residual, attended))
        residual = self.self_attn_layer_norm(residual, self._attend(residual, attend))
        return self.final_layer_norm(residual, self.mlp(residual)), None

    __call__ = forward

    def _attend(self, x: Tensor, attend: Attend) -> Tensor:
        return self.out_proj(attend(self.layer, self.qkv_proj(x)))

    def weight_map(self, prefix: str) -> dict[str, WeightTarget]:
        width = self.out_proj.in_features
        return {
            **self.self_attn_layer_norm.weight_map(f"{prefix}.self_attn_layer_norm"),
            **self.qkv_proj.weight_map(f"{prefix}.self_attn.q_proj", slice(0, width)),
            **self.qkv_proj.weight_map(f"{prefix}.self_attn.k_proj", slice(width, 2 * width)),
            **self.qkv_proj.weight_map(f"{prefix}.self_attn.v_proj", slice(2 * width, None)),
            **self.out_proj.weight_map(f"{prefix}.self_attn.out_proj"),
            **self.final_layer_norm.weight_map(f"{prefix}.final_layer_norm"),
            **self.mlp.up_proj.weight_map(f"{prefix}.fc1"),
            **self.mlp.down_proj.weight_map(f"{prefix}.fc2"),
        }


class OPT(DecoderLM):
    """`OPTForCausalLM` checkpoints."""

    embedding_name: ClassVar[str] = "model.decoder.embed_tokens"

    def __init__(self, config: CheckpointConfig, dtype: torch.dtype, kernels: Kernels = BATCH_INVARIANT) -> None:
        """Make the model with weights still unset. Raises CheckpointError where `config` asks for what we lack."""
        super().__init__()
        self.spec = spec = read_model_spec(config, is_rotary=False)
        embedding_width = config.integer("word_embed_proj_dim", default=spec.hidden_size)
        self._make_ends(
            embedding_width, is_tied=config.flag("tie_word_embeddings", default=True), dtype=dtype, kernels=kernels
        )
        self.embed_positions = Embedding(spec.max_position_embeddings + _FIRST_POSITION, spec.hidden_size, dtype=dtype)
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if embedding_width != spec.hidden_size:
            self.project_in = Linear(embedding_width, spec.hidden_size, bias=False, dtype=dtype, kernels=kernels)
            self.project_out = Linear(spec.hidden_size, embedding_width, bias=False, dtype=dtype, kernels=kernels)
        self.layers = nn.ModuleList(OPTLayer(config, spec, i, dtype, kernels) for i in range(spec.num_layers))
        # Some were fine-tuned while transformers left the last norm out by mistake.
        has_norm = config.flag("do_layer_norm_before", default=True) and not config.flag(
            "_remove_final_layer_norm", default=False
        )
        self.norm = _norm(config, spec.hidden_size, dtype, kernels) if has_norm else None

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        return x.add_(self.embed_positions(positions + _FIRST_POSITION))

    def decode(self, x: Tensor, attend: Attend) -> Tensor:
        residual, added = x, None
        for layer in self.layers:
            residual, added = layer(residual, added, attend)
        if self.norm is not None:
            return self.norm(residual, added)
        return residual if added is None else residual.add_(added)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden if self.project_out is None else self.project_out(hidden))

    def weight_map(self) -> dict[str, WeightTarget]:
        targets = {
            **self.embed_tokens.weight_map("model.decoder.embed_tokens"),
            **self.embed_positions.weight_map("model.decoder.embed_positions"),
        }
        if self.project_in is not None and self.project_out is not None:
            targets |= self.project_in.weight_map("model.decoder.project_in")
            targets |= self.project_out.weight_map("model.decoder.project_out")
        if self.norm is not None:
            targets |= self.norm.weight_map("model.decoder.final_layer_norm")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, OPTLayer)
            targets |= layer.weight_map(f"model.decoder.layers.{i}")
        return targets if self.is_tied else targets | self.lm_head.weight_map("lm_head")

    def weight_name(self, stored: str) -> str | None:
        """Some were saved from the model without its head, so their names have no `model.`."""
        return f"model.{stored}" if stored.startswith("decoder.") else stored


def _norm(config: CheckpointConfig, width: int, dtype: torch.dtype, kernels: Kernels) -> LayerNorm:
    has_weights = config.flag("layer_norm_elementwise_affine", default=True)
    return LayerNorm(width, _NORM_EPS, dtype=dtype, kernels=kernels, has_weights=has_weights)
