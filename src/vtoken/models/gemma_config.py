"""What Gemma's configs say, and what they leave to the defaults of transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from vtoken.attention.spec import AttentionSpec
from vtoken.base.errors import CheckpointError
from vtoken.base.validation import shorten
from vtoken.models.config import CheckpointConfig, read_model_spec
from vtoken.models.llama import Build, read_norm_eps
from vtoken.models.rope_scaling import RopeParameters
from vtoken.models.spec import ModelSpec

# Google's own files leave out what agrees with these.
_DEFAULTS: Final[dict[str, Any]] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2_DEFAULTS: Final[dict[str, Any]] = _DEFAULTS | {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS: Final[dict[str, Any]] = _DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
# Every so many layers one sees the whole text.
_GEMMA2_PATTERN: Final = 2
_GEMMA3_PATTERN: Final = 6

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


@dataclass(frozen=True)
class GemmaConfig:
    """A config, read as far as Gemma's own keys go."""

    config: CheckpointConfig  # with the defaults filled in
    spec: ModelSpec
    ropes: tuple[RopeParameters, ...]  # by the numbers in `AttentionSpec.rotation`
    build: Build  # of the layers' attention
    logit_cap: float | None
    is_tied: bool


def read_gemma_config(config: CheckpointConfig) -> GemmaConfig:
    """Raises CheckpointError where the config asks for what we lack."""
    is_gemma2 = config.architecture == "Gemma2ForCausalLM"
    config = config.revised(defaults=_GEMMA2_DEFAULTS if is_gemma2 else _GEMMA3_DEFAULTS)
    if config.flag("use_bidirectional_attention", default=False):
        raise CheckpointError(f"{config.path}: use_bidirectional_attention is true; only causal attention is supported")
    if is_gemma2:
        by_type = {_FULL: config}
    else:
        if _cap(config, "attn_logit_softcapping") is not None:
            raise CheckpointError(
                f"{config.path}: attn_logit_softcapping must be null for {config.architecture}: Gemma 3 has no such "
                "cap, and transformers takes no notice of it"
            )
        by_type = {
            _FULL: _with_rope(config, _FULL, "rope_theta", 1_000_000.0),
            _SLIDING: _with_rope(config, _SLIDING, "rope_local_base_freq", 10_000.0),
        }
    spec = read_model_spec(by_type[_FULL])
    types = _layer_types(config, spec.num_layers, _GEMMA2_PATTERN if is_gemma2 else _GEMMA3_PATTERN)
    attention = AttentionSpec(
        config.number("query_pre_attn_scalar", default=256) ** -0.5,
        soft_cap=_cap(config, "attn_logit_softcapping") if is_gemma2 else None,
    )
    windowed = replace(attention, window=config.integer("sliding_window"), rotation=len(by_type) - 1)
    return GemmaConfig(
        config,
        replace(spec, layers=tuple(windowed if each == _SLIDING else attention for each in types)),
        ropes=tuple(RopeParameters.from_config(each) for each in by_type.values()),
        build=Build(
            qkv_bias=config.flag("attention_bias", default=False),
            o_bias=config.flag("attention_bias", default=False),
            norms_heads=not is_gemma2,
            plus_one=True,
            norm_eps=read_norm_eps(config),
        ),
        logit_cap=_cap(config, "final_logit_softcapping"),
        is_tied=config.flag("tie_word_embeddings", default=True),
    )


def _cap(config: CheckpointConfig, key: str) -> float | None:
    """A soft cap; null means none, also where the default is one."""
    return None if config.is_null(key) or key not in config.as_dict() else config.number(key)


def _with_rope(config: CheckpointConfig, layer_type: str, base_key: str, default_base: float) -> CheckpointConfig:
    """The config with the rope of this type of layer where others have their only one.

    transformers 5 writes `rope_parameters` with a section for each type; before, `rope_theta` and `rope_scaling` were
    of the layers without a window, and `rope_local_base_freq` of those with one.
    """
    both = config.section("rope_parameters")
    if both is not None and not both.as_dict().keys() <= {_FULL, _SLIDING}:
        raise CheckpointError(
            f"{config.path}: 'rope_parameters' must have a section {_FULL} and one {_SLIDING}, found "
            f"{shorten(sorted(both.as_dict()))}"
        )
    own = None if both is None else both.section(layer_type)
    rope = {"rope_theta": config.number(base_key, default=default_base, minimum=1.0)}
    if own is not None:
        rope |= own.as_dict()
    scaling = config.section("rope_scaling")
    if scaling is not None and layer_type == _FULL:
        rope |= scaling.as_dict()
    return config.revised(rope_parameters=rope, rope_scaling=None, rope_theta=None)


def _layer_types(config: CheckpointConfig, num_layers: int, pattern: int) -> list[str]:
    types = config.texts("layer_types")
    if types is None:
        pattern = config.integer("sliding_window_pattern", default=pattern) if pattern == _GEMMA3_PATTERN else pattern
        return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {_FULL, _SLIDING}:
        raise CheckpointError(
            f"{config.path}: 'layer_types' must name {_FULL} or {_SLIDING} for each of {num_layers} layers, found "
            f"{shorten(types)}"
        )
    return types
