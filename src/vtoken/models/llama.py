"""Llama, and Mistral, which is Llama with a sliding window (arXiv 2302.13971, 2310.06825).

Families that are built alike say in a `Build` where they differ: see `qwen.py` and `phi3.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtoken.attention.rotation import Rotation
from vtoken.base.errors import CheckpointError
from vtoken.models.base import Attend, CausalLM, WeightTarget
from vtoken.models.config import CheckpointConfig, read_model_spec
from vtoken.models.experts import Experts, SparseMLP
from vtoken.models.kernels import BATCH_INVARIANT, Kernels
from vtoken.models.layers import Embedding, GatedMLP, HeadNorms, Linear, RMSNorm, matrix_flops
from vtoken.models.rope import RopeParameters, RotaryEmbedding
from vtoken.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a family decides about its layers."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norms_heads: bool = False  # whether queries and keys have norms of their own
    plus_one: bool = False  # whether those multiply by 1 + weight
    is_fused: bool = False  # whether the checkpoint has q, k and v in one matrix, and gate and up in another
    norm_eps: float
    experts: Experts | None = None
    dense_layers: frozenset[int] = frozenset()  # those that have one MLP all the same


class LlamaAttention(nn.Module):
    """Grouped-query attention with the three projections in one matrix."""

    def __init__(self, build: Build, spec: ModelSpec, layer: int, *, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.layer = layer
        self.is_fused = build.is_fused
        self.q_size = spec.num_heads * spec.head_dim
        self.kv_size = spec.num_kv_heads * spec.head_dim
        self.qkv_proj = Linear(
            spec.hidden_size, self.q_size + 2 * self.kv_size, bias=build.qkv_bias, dtype=dtype, kernels=kernels
        )
        self.o_proj = Linear(self.q_size, spec.hidden_size, bias=build.o_bias, dtype=dtype, kernels=kernels)
        self.head_norms: HeadNorms | None = None
        if build.norms_heads:
            self.head_norms = HeadNorms(
                spec.head_dim,
                spec.num_kv_heads,
                build.norm_eps,
                dtype=dtype,
                kernels=kernels,
                plus_one=build.plus_one,
            )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:  # [T, hidden] -> [T, hidden]
        qkv = self.qkv_proj(x)
        if self.head_norms is not None:
            qkv = self.head_norms(qkv)
        out: Tensor = self.o_proj(attend(self.layer, qkv))
        return out

    __call__ = forward

    def weight_map(self) -> dict[str, WeightTarget]:
        """Names below `self_attn.`."""
        if self.is_fused:
            targets = self.qkv_proj.weight_map("qkv_proj")
        else:
            q_end, k_end = self.q_size, self.q_size + self.kv_size
            targets = {
                **self.qkv_proj.weight_map("q_proj", slice(0, q_end)),
                **self.qkv_proj.weight_map("k_proj", slice(q_end, k_end)),
                **self.qkv_proj.weight_map("v_proj", slice(k_end, None)),
            }
        if self.head_norms is not None:
            targets |= self.head_norms.weight_map()
        return targets | self.o_proj.weight_map("o_proj")


class LlamaLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(
        self, build: Build, spec: ModelSpec, layer: int, width: int, *, dtype: torch.dtype, kernels: Kernels
    ) -> None:
        """`width` is that of the MLP between its matrices."""
        super().__init__()
        self.is_fused = build.is_fused
        self.input_layernorm = RMSNorm(spec.hidden_size, build.norm_eps, dtype=dtype, kernels=kernels)
        self.self_attn = LlamaAttention(build, spec, layer, dtype=dtype, kernels=kernels)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, build.norm_eps, dtype=dtype, kernels=kernels)
        self.mlp: GatedMLP | SparseMLP
        if build.experts is None or layer in build.dense_layers:
            self.mlp = GatedMLP(spec.hidden_size, width, bias=build.mlp_bias, dtype=dtype, kernels=kernels)
        else:
            self.mlp = SparseMLP(spec.hidden_size, build.experts, dtype=dtype, kernels=kernels)

    def forward(self, residual: Tensor, x: Tensor | None, attend: Attend) -> Tensor:
        """Add x, what the layer before returned, to the residual; return what is to be added next. [T, hidden] each."""
        x = self.self_attn(self.input_layernorm(residual, x), attend)
        out: Tensor = self.mlp(self.post_attention_layernorm(residual, x))
        return out

    __call__ = forward

    def weight_map(self) -> dict[str, WeightTarget]:
        """Names below `model.layers.<i>.`."""
        if isinstance(self.mlp, SparseMLP):
            mlp = self.mlp.weight_map()
        else:
            mlp = {f"mlp.{name}": target for name, target in self.mlp.weight_map(self.is_fused).items()}
        return {
            "input_layernorm.weight": WeightTarget(self.input_layernorm.weight),
            "post_attention_layernorm.weight": WeightTarget(self.post_attention_layernorm.weight),
            **{f"self_attn.{name}": target for name, target in self.self_attn.weight_map().items()},
            **mlp,
        }

    @property
    def flops_per_token(self) -> int:
        mlp = self.mlp.flops_per_token if isinstance(self.mlp, SparseMLP) else matrix_flops(self.mlp)
        return matrix_flops(self.self_attn) + mlp


class Llama(CausalLM):
    """`LlamaForCausalLM` and `MistralForCausalLM` checkpoints."""

    def __init__(self, config: CheckpointConfig, dtype: torch.dtype, kernels: Kernels = BATCH_INVARIANT) -> None:
        """Make the model with weights still unset. Raises CheckpointError where `config` asks for what we lack."""
        super().__init__()
        activation = config.text("hidden_act", default="silu")
        if activation != "silu":
            raise CheckpointError(
                f"{config.path}: hidden_act must be 'silu' for {config.architecture}, found {activation!r}"
            )
        spec = self.spec = read_model_spec(config)
        build, width = self.read_build(config), config.integer("intermediate_size")
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            LlamaLayer(build, spec, i, width, dtype=dtype, kernels=kernels) for i in range(spec.num_layers)
        )
        self.is_replayable = not any(isinstance(module, SparseMLP) for module in self.layers.modules())
        self.norm = RMSNorm(spec.hidden_size, build.norm_eps, dtype=dtype, kernels=kernels)
        self.rotary = RotaryEmbedding(
            RopeParameters.from_config(config), spec.head_dim, max_positions=spec.max_position_embeddings
        )
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False, dtype=dtype, kernels=kernels)
        self.is_tied = config.flag("tie_word_embeddings", default=False)
        if self.is_tied:
            self.lm_head.weight = self.embed_tokens.weight

    @staticmethod
    def read_build(config: CheckpointConfig) -> Build:
        """What the config says of the layers; the place where a family that is built alike differs."""
        attention_bias = config.flag("attention_bias", default=False)
        return Build(
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            mlp_bias=config.flag("mlp_bias", default=False),
            norm_eps=read_norm_eps(config),
        )

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(token_ids)

    def rotations(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Rotation, ...]:
        return (self.rotary(positions, lengths),)

    def decode(self, x: Tensor, attend: Attend) -> Tensor:
        residual, added = x, None
        for layer in self.layers:
            added = layer(residual, added, attend)
        out: Tensor = self.norm(residual, added)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(hidden)
        return out.float()

    def weight_map(self) -> dict[str, WeightTarget]:
        targets = {
            **self.embed_tokens.weight_map("model.embed_tokens"),
            "model.norm.weight": WeightTarget(self.norm.weight),
        }
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            targets |= {f"model.layers.{i}.{name}": target for name, target in layer.weight_map().items()}
        return targets if self.is_tied else targets | self.lm_head.weight_map("lm_head")

    def tied_weights(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.is_tied else {}

    def share_prepared(self) -> None:
        if self.is_tied and self.lm_head.prepared is not None:
            self.embed_tokens.share(self.lm_head.prepared)

    @property
    def flops_per_token(self) -> int:
        return sum(layer.flops_per_token for layer in self.layers if isinstance(layer, LlamaLayer))


def read_norm_eps(config: CheckpointConfig, default: float = 1e-6) -> float:
    return config.number("rms_norm_eps", default=default, maximum=1.0)
