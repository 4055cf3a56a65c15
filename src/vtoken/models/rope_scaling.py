"""The variants of rotary embedding, as configs state them and transformers understands them. No torch here.

| type | how it goes beyond the length that a model was trained for |
|---|---|
| default | not at all |
| linear | all waves are `factor` times as long |
| dynamic | theta grows with the length of the sequence ("NTK-aware") |
| llama3 | long waves are stretched, short ones are not, those between are blended |
| yarn | the same with another blend, and sharper attention (Peng et al., arXiv 2309.00071) |
| longrope | a factor for each wave, one list for short and one for long sequences (Ding et al., arXiv 2402.13753) |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vtoken.base.errors import CheckpointError
from vtoken.base.rope_lengths import RopeLengths

if TYPE_CHECKING:
    from vtoken.models.config import CheckpointConfig, ConfigSection

_MAX_POSITIONS: Final = 10**9  # positions are int32


@dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """Plain rotary embedding, and what all variants have in common."""

    rope_type: ClassVar[str] = "default"
    theta: float = 10_000.0
    partial: float = 1.0  # share of a head's elements that turn, from the first on
    attention_factor: float = 1.0  # cos and sin are multiplied by it

    @classmethod
    def from_config(cls, config: CheckpointConfig) -> RopeParameters:
        """Read either style: `rope_scaling` beside `rope_theta`, or transformers 5's `rope_parameters` with both.

        Raises CheckpointError for a variant that this architecture does not have, and for what is missing or makes no
        sense.
        """
        section = config.section("rope_scaling") or config.section("rope_parameters") or config
        theta = config.number("rope_theta", default=10_000.0, minimum=1.0)
        partial = config.number("partial_rotary_factor", default=1.0)
        common = {
            "theta": section.number("rope_theta", default=theta, minimum=1.0),
            "partial": section.number("partial_rotary_factor", default=partial, maximum=1.0),
        }
        if common["partial"] != 1.0 and config.architecture not in _PARTIAL:
            raise CheckpointError(
                f"{config.path}: partial_rotary_factor other than 1 is not supported for {config.architecture}"
            )
        if int(config.head_dim * common["partial"]) < 1:
            raise CheckpointError(f"{config.path}: with partial_rotary_factor {common['partial']:g} nothing turns")
        known = _OWN_TYPES.get(config.architecture, _TYPES)
        rope_type = section.text("rope_type", default=section.text("type", default="default"))
        if rope_type not in known:
            raise CheckpointError(
                f"{config.path}: rope type {rope_type!r} is not supported for {config.architecture}; supported are "
                f"{', '.join(sorted(known))}"
            )
        return known[rope_type].read(section, config, common)

    @classmethod
    def read(cls, section: ConfigSection, config: CheckpointConfig, common: Mapping[str, Any]) -> RopeParameters:
        """What a section of this type says; `common` has the fields above."""
        return cls(**common)

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head that count for the frequencies; where they are odd, one more turns."""
        return int(head_dim * self.partial)

    @property
    def lengths(self) -> RopeLengths | None:
        """Which sequences turn alike; None where all do."""
        return None

    def reach(self, max_position_embeddings: int) -> int:
        """Positions that the model has, of which the config may state those it was trained for."""
        return max_position_embeddings


@dataclass(frozen=True, kw_only=True)
class LinearRope(RopeParameters):
    rope_type = "linear"
    factor: float

    @classmethod
    def read(cls, section: ConfigSection, config: CheckpointConfig, common: Mapping[str, Any]) -> LinearRope:
        return cls(**common, factor=section.number("factor"))


@dataclass(frozen=True, kw_only=True)
class DynamicRope(RopeParameters):
    rope_type = "dynamic"
    factor: float
    original: int  # here the config's max_position_embeddings

    @classmethod
    def read(cls, section: ConfigSection, config: CheckpointConfig, common: Mapping[str, Any]) -> DynamicRope:
        # Below 1 the theta of a long sequence would not be a number.
        rope = cls(
            **common, factor=section.number("factor", minimum=1.0), original=config.integer("max_position_embeddings")
        )
        if rope.rotary_dim(config.head_dim) <= 2:
            raise CheckpointError(f"{config.path}: dynamic rope needs more than 2 elements that turn in a head")
        return rope

    @property
    def lengths(self) -> RopeLengths:
        return RopeLengths(self.original)

    def reach(self, max_position_embeddings: int) -> int:
        return min(int(self.original * self.factor), _MAX_POSITIONS)


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(RopeParameters):
    rope_type = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int

    @classmethod
    def read(cls, section: ConfigSection, config: CheckpointConfig, common: Mapping[str, Any]) -> Llama3Rope:
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if not low < high:
            raise CheckpointError(
                f"{config.path}: llama3 rope needs low_freq_factor < high_freq_factor, found {low} and {high}"
            )
        return cls(
            **common,
            factor=section.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original=_original_length(section, config),
        )


@dataclass(frozen=True, kw_only=True)
class YarnRope(RopeParameters):
    rope_type = "yarn"
    factor: float
    beta_fast: float  # waves that turn more often than this within the original length stay
    beta_slow: float  # those that turn less often are stretched by the whole factor
    truncate: bool  # whether the ends of the blend are rounded to whole waves
    original: int

    @classmethod
    def read(cls, section: ConfigSection, config: CheckpointConfig, common: Mapping[str, Any]) -> YarnRope:
        if common["theta"] == 1.0:
            raise CheckpointError(f"{config.path}: yarn rope needs a rope_theta above 1, found 1")
        original = _original_length(section, config)
        # null, as in transformers, is the ratio of lengths; only a key that is not there is missing.
        ratio = config.integer("max_position_embeddings") / original
        factor = ratio if section.is_null("factor") else section.number("factor")
        mscale, mscale_all_dim = (section.number(key, default=0.0, minimum=0.0) for key in ("mscale", "mscale_all_dim"))
        if mscale and mscale_all_dim:
            attention_factor = _yarn_sharpening(factor, mscale) / _yarn_sharpening(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_sharpening(factor, 1.0)
        return cls(
            **common,
            attention_factor=section.number("attention_factor", default=attention_factor),
            factor=factor,
            beta_fast=section.number("beta_fast", default=32.0, minimum=0.0) or 32.0,
            beta_slow=section.number("beta_slow", default=1.0, minimum=0.0) or 1.0,
            truncate=section.flag("truncate", default=True),
            original=original,
        )

    def reach(self, max_position_embeddings: int) -> int:
        # Some configs state the length before stretching (Qwen 2.5), some the one behind it (DeepSeek).
        return max(max_position_embeddings, min(int(self.original * self.factor), _MAX_POSITIONS))


def _yarn_sharpening(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRope(RopeParameters):
    rope_type = "longrope"
    short_factor: tuple[float, ...]  # one a frequency
    long_factor: tuple[float, ...]
    original: int  # up to here a sequence turns by the short factors
    longest: int

    @classmethod
    def read(cls, section: ConfigSection, config: CheckpointConfig, common: Mapping[str, Any]) -> LongRope:
        longest, original = config.integer("max_position_embeddings"), _original_length(section, config)
        factor = section.number("factor", default=longest / original)
        if original == 1 and factor > 1:
            raise CheckpointError(f"{config.path}: longrope needs an original_max_position_embeddings above 1, found 1")
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        num_frequencies = -(-int(config.head_dim * common["partial"]) // 2)
        return cls(
            **common,
            attention_factor=section.number("attention_factor", default=attention_factor),
            short_factor=section.numbers("short_factor", num_frequencies),
            long_factor=section.numbers("long_factor", num_frequencies),
            original=original,
            longest=longest,
        )

    @property
    def lengths(self) -> RopeLengths:
        return RopeLengths(self.original, max(self.longest, self.original + 1))


def _original_length(section: ConfigSection, config: CheckpointConfig) -> int:
    """`original_max_position_embeddings`: the one beside the section wins, as in transformers."""
    default = _DEFAULT_ORIGINAL.get(config.architecture) or config.integer("max_position_embeddings")
    key = "original_max_position_embeddings"
    return config.integer(key, default=section.integer(key, default=default))


_TYPES: Final[Mapping[str, type[RopeParameters]]] = {
    variant.rope_type: variant for variant in (RopeParameters, LinearRope, DynamicRope, Llama3Rope, YarnRope, LongRope)
}

# Where transformers has its own ideas about an architecture.
_PARTIAL: Final = frozenset({"Phi3ForCausalLM"})
_OWN_TYPES: Final[Mapping[str, Mapping[str, type[RopeParameters]]]] = {
    # "su" and "yarn" are what longrope was called in the first checkpoints.
    "Phi3ForCausalLM": {"default": RopeParameters, "longrope": LongRope, "su": LongRope, "yarn": LongRope}
}
_DEFAULT_ORIGINAL: Final = {"Phi3ForCausalLM": 4096}
