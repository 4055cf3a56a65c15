"""`ModelSpec`: what the rest of the engine has to know about a model. No torch here: reading a config costs none."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.attention.spec import AttentionSpec
from vtoken.base.rope_lengths import RopeLengths

__all__ = ["AttentionSpec", "ModelSpec"]


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and token ids of one checkpoint, as its config files state them."""

    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # not always hidden_size / num_heads
    max_position_embeddings: int  # positions run over [0, max_position_embeddings)
    layers: tuple[AttentionSpec, ...]  # [num_layers]
    eos_token_ids: frozenset[int]  # any of them ends an answer
    bos_token_id: int | None
    rope_lengths: RopeLengths | None = None  # None: how a sequence turns does not depend on its length
