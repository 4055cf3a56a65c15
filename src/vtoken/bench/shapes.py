"""Shapes of well-known models: what the roofline needs to know of them, without their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vtoken.base.errors import ConfigError
from vtoken.base.registry import suggest
from vtoken.planner.kv_memory import KVShape

_DTYPE: Final = "bfloat16"
_BYTES_PER_WEIGHT: Final = 2


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with weights and KV in bfloat16."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_weights: int
    max_position_embeddings: int

    @property
    def kv(self) -> KVShape:
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim, _DTYPE)

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * _BYTES_PER_WEIGHT

    @property
    def flops_per_token(self) -> int:
        """Of everything but attention: a multiplication and an addition a weight."""
        return 2 * self.num_weights

    @property
    def flops_per_pair(self) -> int:
        """Of attention, for one query token that sees one token."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


# Figures of the models' config.json; weights counted from their checkpoints.
SHAPES: Final = {
    "mistral-7b": ModelShape(32, 32, 8, 128, 7_241_732_096, 32_768),
    "llama-3.1-8b": ModelShape(32, 32, 8, 128, 8_030_261_248, 131_072),
    "qwen2.5-14b": ModelShape(48, 40, 8, 128, 14_770_033_664, 131_072),
    "smollm2-135m": ModelShape(30, 9, 3, 64, 134_515_008, 8_192),
}


def find_shape(name: str) -> ModelShape:
    """Raises ConfigError for an unknown name."""
    if name not in SHAPES:
        raise ConfigError(f"shape: unknown model {name!r}; {suggest(name, list(SHAPES))}known: {', '.join(SHAPES)}")
    return SHAPES[name]
