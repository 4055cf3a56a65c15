"""Rotary position embedding (Su et al., arXiv 2104.09864), as transformers computes it.

Two halves, not interleaved pairs: element `i` turns with element `i + rotary_dim / 2` by `position * inv_freq[i]`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

import torch
from torch import Tensor, nn

from vtoken.attention.rotation import Rotation
from vtoken.models.rope_scaling import DynamicRope, LinearRope, Llama3Rope, LongRope, RopeParameters, YarnRope

__all__ = ["RopeParameters", "RotaryEmbedding", "inverse_frequencies"]

# The table is filled in pieces of this one size, so that an entry's bits do not depend on how far it is filled.
TABLE_CHUNK: Final = 1024
# Tables of sequences' own lengths that are kept: more than run at once, or each step would fill them anew.
MOST_TABLES: Final = 512


def inverse_frequencies(rope: RopeParameters, head_dim: int, length: int | None = None) -> Tensor:
    """Radians a position for each pair of elements that turns: float32 [ceil(rotary_dim / 2)].

    `length` is the one that the sequence turns by, where `rope.lengths` says that it counts; None = the original one.
    """
    dim = rope.rotary_dim(head_dim)
    theta = torch.tensor(rope.theta, device="cpu")
    if isinstance(rope, DynamicRope) and length is not None and length > rope.original:
        # In float32, as in transformers, where lengths are tensors.
        stretch = rope.factor * torch.tensor(length, device="cpu") / rope.original - (rope.factor - 1)
        theta = rope.theta * stretch ** (dim / (dim - 2))
    # Even while the loader outlines a model on the meta device: torch's arange there imports for a second.
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    wavelengths = torch.pow(theta, exponents)  # positions a radian
    match rope:
        case LinearRope():
            return 1.0 / wavelengths / rope.factor
        case Llama3Rope():
            return _llama3(1.0 / wavelengths, rope)
        case YarnRope():
            return _yarn(wavelengths, dim, rope)
        case LongRope():
            is_long = length is not None and length > rope.original
            factors = torch.tensor(rope.long_factor if is_long else rope.short_factor, device="cpu")
            return 1.0 / (factors * wavelengths)
    return 1.0 / wavelengths


def _llama3(inv_freq: Tensor, rope: Llama3Rope) -> Tensor:
    """Keep the short waves, stretch the long ones by `factor`, and blend between (Llama 3.1 reference code)."""
    context = rope.original
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq  # positions a turn
    is_long = wavelength > context / low
    is_short = wavelength < context / high
    stretched = torch.where(is_long, inv_freq / rope.factor, inv_freq)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    return torch.where(~is_long & ~is_short, blended, stretched)


def _yarn(wavelengths: Tensor, dim: int, rope: YarnRope) -> Tensor:
    """wavelengths [dim / 2] in positions a radian. Blend by how often a wave turns within the original length."""

    def wave_that_turns(times: float) -> float:
        return dim * math.log(rope.original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    begin, end = wave_that_turns(rope.beta_fast), wave_that_turns(rope.beta_slow)
    if rope.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, dim - 1)
    width = 0.001 if begin == end else end - begin
    places = torch.arange(len(wavelengths), dtype=torch.float32, device="cpu")
    kept = 1 - ((places - begin) / width).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


class _Table:
    """cos and sin in float32, filled as far as positions have been seen.

    Memory: 8 bytes a frequency and position; untouched until used, so a context of a million tokens costs nothing
    before it is real.
    """

    def __init__(self, inv_freq: Tensor, factor: float, num_positions: int) -> None:
        self._inv_freq, self._factor = inv_freq, factor
        num_rows = math.ceil(num_positions / TABLE_CHUNK) * TABLE_CHUNK
        self._cos = torch.empty(num_rows, len(inv_freq))
        self._sin = torch.empty(num_rows, len(inv_freq))
        self._num_filled = 0  # rows [0, _num_filled) of both tables are valid

    @property
    def num_frequencies(self) -> int:
        return len(self._inv_freq)

    def turn(self, positions: Tensor, last: int) -> Rotation:
        """Of the positions [T], of which `last` is the greatest."""
        while self._num_filled <= last:
            rows = slice(self._num_filled, self._num_filled + TABLE_CHUNK)
            angles = torch.arange(rows.start, rows.stop, dtype=torch.float32)[:, None] * self._inv_freq
            self._cos[rows] = angles.cos().mul_(self._factor)
            self._sin[rows] = angles.sin().mul_(self._factor)
            self._num_filled = rows.stop
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))


class RotaryEmbedding(nn.Module):
    """Positions -> how they turn; for models whose frequencies depend on a sequence's length, by that as well."""

    def __init__(self, rope: RopeParameters, head_dim: int, max_positions: int) -> None:
        super().__init__()
        self._rope, self._head_dim = rope, head_dim
        self._max_positions = max_positions
        # The last used at the end; by length, None = the original one.
        self._tables: OrderedDict[int | None, _Table] = OrderedDict()
        self._table(None)

    def forward(self, positions: Tensor, lengths: Tensor | None = None) -> Rotation:
        """The turn of each of the positions [T], in sequences that turn by these lengths [T] (see `RopeLengths`)."""
        last = int(positions.max()) if len(positions) else -1
        assert last < self._max_positions, f"position {last} is beyond the model's {self._max_positions}"
        if lengths is None or self._rope.lengths is None or not len(positions):
            return self._table(None).turn(positions, last)
        several = torch.unique(lengths).tolist()
        if len(several) == 1:
            return self._table(several[0]).turn(positions, last)
        cos = torch.empty(len(positions), self._table(None).num_frequencies)
        joined = Rotation(cos, torch.empty_like(cos))
        for length in several:
            tokens = torch.nonzero(lengths == length).flatten()
            own = positions[tokens]
            part = self._table(length).turn(own, int(own.max()))
            joined.cos[tokens], joined.sin[tokens] = part.cos, part.sin
        return joined

    def _table(self, length: int | None) -> _Table:
        lengths = self._rope.lengths
        if lengths is not None and length == lengths.original:
            length = None
        if length in self._tables:
            self._tables.move_to_end(length)
            return self._tables[length]
        inv_freq = inverse_frequencies(self._rope, self._head_dim, length)
        num_positions = self._max_positions if length is None else min(length, self._max_positions)
        table = self._tables[length] = _Table(inv_freq, self._rope.attention_factor, num_positions)
        if len(self._tables) > MOST_TABLES:
            self._tables.popitem(last=False)
        return table
