"""Rotary position embedding (Su et al., arXiv 2104.09864), as transformers computes it.

Two halves, not interleaved pairs: element `i` turns with element `i + head_dim / 2` by `position * inv_freq[i]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtoken.attention.rotation import Rotation
from vtoken.base.errors import CheckpointError
from vtoken.models.config import CheckpointConfig, ConfigSection

# The table is filled in pieces of this one size, so that an entry's bits do not depend on how far it is filled.
TABLE_CHUNK = 1024


@dataclass(frozen=True)
class RopeParameters:
    """What decides the frequencies. `factor` and below are 1 where the variant does not use them."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 1

    @classmethod
    def from_config(cls, config: CheckpointConfig) -> RopeParameters:
        """Read either style: `rope_scaling` beside `rope_theta`, or transformers 5's `rope_parameters` with both.

        Raises CheckpointError for a variant we do not have and for a missing or nonsensical number.
        """
        section = config.section("rope_scaling") or config.section("rope_parameters") or config
        theta = section.number(
            "rope_theta", default=config.number("rope_theta", default=10_000.0, minimum=1.0), minimum=1.0
        )
        partial = section.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0))
        if partial != 1.0:
            raise CheckpointError(
                f"{config.path}: partial_rotary_factor other than 1 is not supported for {config.architecture}"
            )
        rope_type = section.text("rope_type", default=section.text("type", default="default"))
        if rope_type not in _READERS:
            raise CheckpointError(
                f"{config.path}: rope type {rope_type!r} is not supported; supported are {', '.join(sorted(_READERS))}"
            )
        return _READERS[rope_type](section, theta, config)


def _read_default(section: ConfigSection, theta: float, config: CheckpointConfig) -> RopeParameters:
    return RopeParameters(theta=theta)


def _read_linear(section: ConfigSection, theta: float, config: CheckpointConfig) -> RopeParameters:
    return RopeParameters("linear", theta=theta, factor=section.number("factor"))


def _read_llama3(section: ConfigSection, theta: float, config: CheckpointConfig) -> RopeParameters:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if not low < high:
        raise CheckpointError(
            f"{config.path}: llama3 rope needs low_freq_factor < high_freq_factor, found {low} and {high}"
        )
    return RopeParameters(
        "llama3",
        theta=theta,
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        # The one beside the section wins, as in transformers.
        original_max_position_embeddings=config.integer(
            "original_max_position_embeddings",
            default=section.integer(
                "original_max_position_embeddings", default=config.integer("max_position_embeddings")
            ),
        ),
    )


_READERS = {"default": _read_default, "linear": _read_linear, "llama3": _read_llama3}


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """Radians a position for each pair of elements: float32 [head_dim / 2]."""
    # Even while the loader outlines a model on the meta device: torch's arange there imports for a second.
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    inv_freq = 1.0 / (rope.theta ** (steps / head_dim))
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeParameters) -> Tensor:
    """Keep the short waves, stretch the long ones by `factor`, and blend between (Llama 3.1 reference code)."""
    context = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq  # positions a turn
    is_long = wavelength > context / low
    is_short = wavelength < context / high
    stretched = torch.where(is_long, inv_freq / rope.factor, inv_freq)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    return torch.where(~is_long & ~is_short, blended, stretched)


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin in float32, filled as far as positions have been seen.

    Memory: `8 * head_dim / 2` bytes a position; untouched until used, so a context of a million tokens costs nothing
    before it is real.
    """

    def __init__(self, rope: RopeParameters, head_dim: int, max_positions: int) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies(rope, head_dim)  # [head_dim / 2]
        self._max_positions = max_positions
        num_rows = math.ceil(max_positions / TABLE_CHUNK) * TABLE_CHUNK
        self._cos = torch.empty(num_rows, head_dim // 2)
        self._sin = torch.empty(num_rows, head_dim // 2)
        self._num_filled = 0  # rows [0, _num_filled) of both tables are valid

    def forward(self, positions: Tensor) -> Rotation:
        """The turn of each of the positions [T]."""
        last = int(positions.max()) if len(positions) else -1
        assert last < self._max_positions, f"position {last} is beyond the model's {self._max_positions}"
        while self._num_filled <= last:
            self._fill_chunk()
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))

    def _fill_chunk(self) -> None:
        rows = slice(self._num_filled, self._num_filled + TABLE_CHUNK)
        angles = torch.arange(rows.start, rows.stop, dtype=torch.float32)[:, None] * self.inv_freq
        self._cos[rows] = angles.cos()
        self._sin[rows] = angles.sin()
        self._num_filled = rows.stop
