"""The one home of KV arithmetic: bytes a token, blocks in a budget, lengths that fit.

bytes = layers x 2 (keys, values) x kv_heads x head_dim x bytes an element, for each token of each sequence;
formats with scales add a float32 a head to each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vtoken.base import host_memory
from vtoken.base.config import EngineConfig
from vtoken.base.errors import ConfigError
from vtoken.base.kv_format import KV_FORMATS, KVFormat
from vtoken.base.units import format_bytes

DEFAULT_SHARE = 0.5  # of the memory that is available once the weights are loaded
DEFAULT_LIMIT = 4 * 1024**3  # bytes: a small model on a big host should not take it all


@dataclass(frozen=True)
class KVShape:
    """What one token's keys and values look like in a model.

    >>> KVShape(num_layers=32, num_kv_heads=8, head_dim=128, key_dtype="bfloat16").bytes_per_token  # Llama-3.1-8B
    131072
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    key_dtype: str  # a name in KV_FORMATS
    value_dtype: str | None = None  # None = like the keys

    @property
    def key_format(self) -> KVFormat:
        return KV_FORMATS[self.key_dtype]

    @property
    def value_format(self) -> KVFormat:
        return KV_FORMATS[self.value_dtype or self.key_dtype]

    @property
    def bytes_per_token(self) -> int:
        heads = self.num_layers * self.num_kv_heads
        return heads * sum(form.bytes_per_head(self.head_dim) for form in (self.key_format, self.value_format))

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * block_size

    def bytes_for(self, num_tokens: int, batch: int = 1) -> int:
        """KV bytes of `batch` sequences of `num_tokens` tokens that share nothing and waste nothing."""
        return self.bytes_per_token * num_tokens * batch

    def blocks_in(self, num_bytes: int, block_size: int) -> int:
        """Whole blocks that fit into `num_bytes`."""
        return num_bytes // self.bytes_per_block(block_size)


@dataclass(frozen=True)
class KVPlan:
    """The sizes an engine starts with."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def largest_model_len(num_blocks: int, block_size: int) -> int:
    """The longest sequence that a pool of `num_blocks` blocks holds, alone and with nothing evicted."""
    return num_blocks * block_size


def default_kv_bytes(available: int) -> int:
    """Size of the KV pool when nobody says: half of the `available` bytes, at most 4 GiB.

    It depends on nothing else, so that a longer `max_model_len` never moves the size of the pool.
    """
    return min(int(available * DEFAULT_SHARE), DEFAULT_LIMIT)


def plan_kv(
    config: EngineConfig,
    shape: KVShape,
    model_max_len: int,
    available: int | None = None,
    longest: Callable[[int, int], int] = largest_model_len,
) -> KVPlan:
    """Settle pool, swap space and length for a model whose own longest sequence is `model_max_len` tokens.

    `longest` gives the longest sequence that a pool of so many blocks, of so many tokens each, can serve.

    `available` is the memory the pool may take, in bytes; by default what the host has left now, so call it with the
    weights loaded. Raises ConfigError, with the numbers, for what does not fit.
    """
    available = host_memory.available_bytes() if available is None else available
    num_blocks = _plan_pool(config, shape, available)
    # The host never needs to hold more blocks than the device can.
    num_host_blocks = min(shape.blocks_in(config.swap_space, config.block_size), num_blocks)
    needed = (num_blocks + num_host_blocks) * shape.bytes_per_block(config.block_size)
    if needed > available:
        raise ConfigError(
            f"a KV pool of {num_blocks} blocks and {num_host_blocks} more of swap space need {needed} bytes "
            f"({format_bytes(needed)}), but this host has {available} bytes ({format_bytes(available)}) of memory "
            "available; ask for less"
        )
    return KVPlan(num_blocks, num_host_blocks, _plan_length(config, shape, num_blocks, model_max_len, longest))


def _plan_pool(config: EngineConfig, shape: KVShape, available: int) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_memory is not None:
        asked, pool = f"kv_memory={config.kv_memory}", config.kv_memory
    else:
        asked, pool = "the default size of the KV pool", default_kv_bytes(max(0, available - config.swap_space))
    num_blocks = shape.blocks_in(pool, config.block_size)
    if num_blocks == 0:
        raise ConfigError(
            f"{asked} gives {pool} bytes, but one block of {config.block_size} tokens takes "
            f"{shape.bytes_per_block(config.block_size)} bytes with this model; set a larger kv_memory or a smaller "
            "block_size"
        )
    return num_blocks


def _plan_length(
    config: EngineConfig, shape: KVShape, num_blocks: int, model_max_len: int, longest: Callable[[int, int], int]
) -> int:
    largest = longest(num_blocks, config.block_size)
    if config.max_model_len == "auto":
        return min(model_max_len, largest)
    length = model_max_len if config.max_model_len is None else config.max_model_len
    if length <= min(model_max_len, largest):
        return length
    block_bytes = shape.bytes_per_block(config.block_size)
    needed, pool = blocks_for(length, config.block_size) * block_bytes, num_blocks * block_bytes
    needs = (
        f"needs {needed} bytes ({format_bytes(needed)}) of KV memory, but the pool has {pool} bytes "
        f"({format_bytes(pool)}) in {num_blocks} blocks: the largest length that fits is {largest}"
    )
    if config.max_model_len is None:
        raise ConfigError(
            f"the model's own max_model_len, {length}, {needs}. Set max_model_len='auto' (gives {largest}), or set a "
            "larger kv_memory or num_blocks"
        )
    if length <= model_max_len:
        raise ConfigError(
            f"max_model_len={length} {needs}. Set max_model_len to {largest} or 'auto', or set a larger kv_memory or "
            "num_blocks"
        )
    # Both reasons at once: who mends the one alone would meet the other next.
    too_large = f"; it also {needs}" if length > largest else ""
    raise ConfigError(
        f"max_model_len={length} is beyond the {model_max_len} positions of the model{too_large}. Set max_model_len to "
        f"{min(model_max_len, largest)} or 'auto'"
    )
