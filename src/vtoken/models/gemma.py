"""Gemma 2 and 3 (arXiv 2408.00118, 2503.19786): norms around attention and MLP, layers with a window between others."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vtoken.attention.rotation import Rotation
from vtoken.models.activations import read_activation
from vtoken.models.base import Attend, WeightTarget
from vtoken.models.config import CheckpointConfig
from vtoken.models.decoder import DecoderLM
from vtoken.models.gemma_config import GemmaConfig, read_gemma_config
from vtoken.models.kernels import BATCH_INVARIANT, Kernels, soft_cap
from vtoken.models.layers import GatedMLP, RMSNorm
from vtoken.models.llama import LlamaAttention
from vtoken.models.rope import RotaryEmbedding


class GemmaLayer(nn.Module):
    """Attention and MLP beside a residual, a norm before and a norm behind each."""

    def __init__(self, gemma: GemmaConfig, layer: int, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        config, spec = gemma.config, gemma.spec

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, gemma.build.norm_eps, dtype=dtype, kernels=kernels, plus_one=True)

        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(gemma.build, spec, layer, dtype=dtype, kernels=kernels)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(
            spec.hidden_size,
            config.integer("intermediate_size"),
            bias=False,
            dtype=dtype,
            kernels=kernels,
            activation=read_activation(config, "hidden_activation", default="gelu_pytorch_tanh"),
        )
        self.post_feedforward_layernorm = norm()

    def forward(self, residual: Tensor, x: Tensor | None, attend: Attend) -> Tensor:
        """Add x, what the layer before returned, to the residual; return what is to be added next. [T, hidden] each."""
        attended = self.self_attn(self.input_layernorm(residual, x), attend)
        x = self.pre_feedforward_layernorm(residual, self.post_attention_layernorm(attended))
        return self.post_feedforward_layernorm(self.mlp(x))

    __call__ = forward

    def weight_map(self, prefix: str) -> dict[str, WeightTarget]:
        return {
            **self.input_layernorm.weight_map(f"{prefix}.input_layernorm"),
            **self.post_attention_layernorm.weight_map(f"{prefix}.post_attention_layernorm"),
            **self.pre_feedforward_layernorm.weight_map(f"{prefix}.pre_feedforward_layernorm"),
            **self.post_feedforward_layernorm.weight_map(f"{prefix}.post_feedforward_layernorm"),
            **{f"{prefix}.self_attn.{name}": target for name, target in self.self_attn.weight_map().items()},
            **{f"{prefix}.mlp.{name}": target for name, target in self.mlp.weight_map().items()},
        }


class Gemma(DecoderLM):
    """`Gemma2ForCausalLM`, `Gemma3ForCausalLM`, and of `Gemma3ForConditionalGeneration` the part that writes text."""

    embedding_name: ClassVar[str] = "model.embed_tokens"

    def __init__(self, config: CheckpointConfig, dtype: torch.dtype, kernels: Kernels = BATCH_INVARIANT) -> None:
        """Make the model with weights still unset. Raises CheckpointError where `config` asks for what we lack."""
        super().__init__()
        gemma = read_gemma_config(config)
        self.spec = spec = gemma.spec
        self._make_ends(spec.hidden_size, is_tied=gemma.is_tied, dtype=dtype, kernels=kernels)
        # Rounded as the embeddings are: in bfloat16 sqrt(640) is 25.25.
        self._embedding_scale = torch.tensor(spec.hidden_size**0.5, dtype=dtype, device="cpu").item()
        self._logit_cap = gemma.logit_cap
        self.layers = nn.ModuleList(GemmaLayer(gemma, i, dtype, kernels) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, gemma.build.norm_eps, dtype=dtype, kernels=kernels, plus_one=True)
        self.rotaries = nn.ModuleList(
            RotaryEmbedding(rope, spec.head_dim, max_positions=spec.max_position_embeddings) for rope in gemma.ropes
        )

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(token_ids).mul_(self._embedding_scale)

    def rotations(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Rotation, ...]:
        return tuple(rotary(positions, lengths) for rotary in self.rotaries)

    def decode(self, x: Tensor, attend: Attend) -> Tensor:
        residual, added = x, None
        for layer in self.layers:
            added = layer(residual, added, attend)
        return self.norm(residual, added)

    def logits(self, hidden: Tensor) -> Tensor:
        out = super().logits(hidden)
        return out if self._logit_cap is None else soft_cap(out, self._logit_cap)

    def weight_map(self) -> dict[str, WeightTarget]:
        targets = {
            **self.embed_tokens.weight_map("model.embed_tokens"),
            **self.norm.weight_map("model.norm"),
        }
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, GemmaLayer)
            targets |= layer.weight_map(f"model.layers.{i}")
        return targets if self.is_tied else targets | self.lm_head.weight_map("lm_head")

    def weight_name(self, stored: str) -> str | None:
        """Of a model that sees as well, the part that writes; transformers has moved its prefix about."""
        bare = stored.removeprefix("model.")
        if bare.startswith(("vision_tower.", "multi_modal_projector.")):
            return None
        if bare.startswith("language_model."):
            bare = bare.removeprefix("language_model.").removeprefix("model.")
            return super().weight_name(bare if bare.startswith("lm_head.") else f"model.{bare}")
        return super().weight_name(stored)
