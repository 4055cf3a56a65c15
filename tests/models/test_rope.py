"""Rotary tables against transformers, and what is refused (behaviour U19)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.tiny_models import DYNAMIC_ROPE, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, long_rope
from vtoken.base.errors import CheckpointError
from vtoken.models import rope
from vtoken.models.config import CheckpointConfig, read_model_spec
from vtoken.models.rope import TABLE_CHUNK, RopeParameters, RotaryEmbedding, inverse_frequencies

ORIGINAL_MAX = 64
POSITIONS = torch.tensor([0, 1, 100, ORIGINAL_MAX, 2 * ORIGINAL_MAX, TABLE_CHUNK - 1, TABLE_CHUNK, 8191])

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "max_position_embeddings": 8192,
}


def parameters(**config: Any) -> RopeParameters:
    return RopeParameters.from_config(CheckpointConfig(Path("m"), CONFIG | config))


SCALED_STYLES: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"rope_scaling": None, "rope_theta": 50_000.0},
    "empty": {"rope_scaling": {}, "rope_parameters": {}},
    "theta-as-integer": {"rope_theta": 500_000},
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}},
    "linear": {"rope_parameters": LINEAR_ROPE},
    "linear-legacy": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 20_000.0},
    "llama3": {"rope_parameters": LLAMA3_ROPE},
    "llama3-legacy": {
        "rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
        "rope_theta": 500_000.0,
    },
    "llama3-without-original-length": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "yarn": {"rope_parameters": YARN_ROPE},
    "yarn-legacy": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
    "yarn-without-original-length": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn-original-length-beside": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": ORIGINAL_MAX,
    },
    "yarn-null-factor": {"rope_parameters": YARN_ROPE | {"factor": None}},
    "yarn-attention-factor": {"rope_parameters": YARN_ROPE | {"attention_factor": 0.7}},
    "yarn-mscale": {"rope_parameters": YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn-mscale-without-the-other": {"rope_parameters": YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0}},
    "yarn-betas": {"rope_parameters": YARN_ROPE | {"beta_fast": 5, "beta_slow": 0.5}},
    "yarn-betas-of-zero": {"rope_parameters": YARN_ROPE | {"beta_fast": 0, "beta_slow": None}},
    "yarn-not-truncated": {"rope_parameters": YARN_ROPE | {"truncate": False}},
    "yarn-without-a-blend": {"rope_parameters": YARN_ROPE | {"beta_fast": 1, "beta_slow": 1, "truncate": False}},
    "yarn-factor-below-one": {"rope_parameters": YARN_ROPE | {"factor": 0.5}},
    "dynamic-within-its-length": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "longrope-long": {"rope_parameters": long_rope(32)},
    "longrope-legacy": {
        "rope_scaling": {k: v for k, v in long_rope(32).items() if k.endswith("factor")} | {"type": "longrope"},
        "original_max_position_embeddings": ORIGINAL_MAX,
    },
    "longrope-factor": {"rope_parameters": long_rope(32) | {"factor": 3.0}},
    "longrope-attention-factor": {"rope_parameters": long_rope(32) | {"attention_factor": 1.4}},
    "longrope-that-does-not-stretch": {"rope_parameters": long_rope(32) | {"factor": 1.0}},
}


@pytest.mark.parametrize("style", SCALED_STYLES)
def test_tables_equal_transformers(style: str) -> None:
    config = SCALED_STYLES[style]
    theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(CONFIG | config))))
    expected_cos, expected_sin = theirs(torch.zeros(1, dtype=torch.float32), POSITIONS[None])

    ours = parameters(**config)
    length = None if ours.lengths is None else ours.lengths.of(8192)
    lengths = None if length is None else torch.full_like(POSITIONS, length)
    turn = RotaryEmbedding(ours, head_dim=64, max_positions=8192)(POSITIONS, lengths)

    assert torch.equal(inverse_frequencies(ours, 64, length), theirs.inv_freq)
    assert ours.attention_factor == theirs.attention_scaling
    # They repeat the half; cos and sin themselves may differ in the last bit with the SIMD lane.
    torch.testing.assert_close(turn.cos, expected_cos[0, :, :32], atol=2e-7, rtol=0)
    torch.testing.assert_close(turn.sin, expected_sin[0, :, :32], atol=2e-7, rtol=0)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 128, 129, 1000, 1023])
@pytest.mark.parametrize("scaling", [DYNAMIC_ROPE, long_rope(32)], ids=["dynamic", "longrope"])
def test_a_sequence_turns_by_its_length(scaling: dict[str, Any], length: int) -> None:
    """Told its length from the start, as transformers turns once it has come to it; whoever turns beside it."""
    longest = 64 if scaling["rope_type"] == "dynamic" else 1024
    config = {"rope_parameters": scaling, "max_position_embeddings": longest}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(CONFIG | config))))
    positions = torch.arange(length)
    cos, sin = (part[0, :, :32] for part in theirs(torch.zeros(1), positions[None]))

    ours = parameters(**config)
    assert ours.lengths is not None
    rotary = RotaryEmbedding(ours, head_dim=64, max_positions=1024)
    own = torch.full_like(positions, ours.lengths.of(length))
    alone = rotary(positions, own)
    others = torch.tensor([64, 777, 900])
    other_lengths = torch.tensor([ours.lengths.of(each + 1) for each in others.tolist()])
    mixed = rotary(torch.cat([others, positions]), torch.cat([other_lengths, own]))

    torch.testing.assert_close(alone.cos, cos, atol=5e-7, rtol=0)
    torch.testing.assert_close(alone.sin, sin, atol=5e-7, rtol=0)
    assert torch.equal(mixed.cos[3:], alone.cos)
    assert torch.equal(mixed.sin[3:], alone.sin)
    for i, (position, other) in enumerate(zip(others, other_lengths, strict=True)):
        assert torch.equal(mixed.cos[i], rotary(position[None], other[None]).cos[0])


def test_more_lengths_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "MOST_TABLES", 3)
    rotary = RotaryEmbedding(parameters(rope_parameters=DYNAMIC_ROPE, max_position_embeddings=64), 64, 256)
    positions, lengths = torch.arange(100, 110), torch.arange(120, 130)
    first, second = rotary(positions, lengths), rotary(positions, lengths)
    assert torch.equal(first.cos, second.cos)
    assert len(rotary._tables) == 3
    assert len({tuple(row) for row in first.cos.tolist()}) == 10


@pytest.mark.parametrize(
    ("config", "of_length", "positions"),
    [
        ({}, None, 8192),
        ({"rope_parameters": LINEAR_ROPE}, None, 8192),
        ({"rope_parameters": DYNAMIC_ROPE}, {1: 8192, 8192: 8192, 8193: 8193, 20_001: 20_001}, 4 * 8192),
        ({"rope_parameters": YARN_ROPE}, None, 8192),
        ({"rope_parameters": YARN_ROPE | {"original_max_position_embeddings": 8192}}, None, 8 * 8192),
        ({"rope_parameters": long_rope(32)}, {1: 64, 64: 64, 65: 8192, 8192: 8192}, 8192),
    ],
    ids=str,
)
def test_what_the_engine_is_told(config: dict[str, Any], of_length: dict[int, int] | None, positions: int) -> None:
    """How far texts may go (a length is not multiplied twice), and which sequences turn alike."""
    spec = read_model_spec(CheckpointConfig(Path("m"), CONFIG | config))
    assert spec.max_position_embeddings == positions
    assert (spec.rope_lengths is None) == (of_length is None)
    for total, length in (of_length or {}).items():
        assert spec.rope_lengths is not None
        assert spec.rope_lengths.of(total) == length


def test_scaling_changes_the_tables() -> None:
    plain = inverse_frequencies(parameters(), 64)
    assert torch.equal(inverse_frequencies(parameters(rope_parameters=LINEAR_ROPE), 64), plain / 4)
    llama3 = inverse_frequencies(parameters(rope_parameters=LLAMA3_ROPE), 64)
    assert torch.equal(llama3[0], plain[0])  # short waves stay
    assert torch.equal(llama3[-1], plain[-1] / 8)  # long ones are stretched by the whole factor
    assert ((llama3 > plain / 8) & (llama3 < plain)).any()  # and some lie between


def test_an_entry_does_not_depend_on_how_the_table_was_filled() -> None:
    late, early = (RotaryEmbedding(RopeParameters(), 10, max_positions=5000) for _ in range(2))
    far, near = torch.tensor([4999]), torch.tensor([1500])
    late(far)
    early(near)
    assert torch.equal(late(near).cos, early(near).cos)
    assert torch.equal(late(far).sin, early(far).sin)


@pytest.mark.parametrize("rope_type", ["foo", "su", "mrope", "proportional"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_unknown_types_are_refused_by_name(rope_type: str, key: str, section: str) -> None:
    with pytest.raises(
        CheckpointError,
        match=rf"rope type '{rope_type}' .*supported are default, dynamic, linear, llama3, longrope, yarn",
    ):
        parameters(**{section: {key: rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rope_type": "linear"}, r"required key 'rope_scaling\.factor' is missing"),
        (
            {"rope_type": "linear", "factor": 0},
            r"'rope_scaling\.factor' must be a number from 1e-12 to 1e\+12, found 0",
        ),
        ({"rope_type": "linear", "factor": "4"}, r"must be a number from \S+ to \S+, found '4'"),
        ({"rope_type": "linear", "factor": 1e-300}, r"'rope_scaling\.factor' must be .*, found 1e-300$"),
        ({"rope_type": "linear", "factor": 10**400}, r"'rope_scaling\.factor' must be .*, found 10{50,}…$"),
        (
            {"rope_type": "default", "rope_theta": float("inf")},
            r"rope_theta' must be a number from 1 to 1e\+12, .* inf$",
        ),
        ({"rope_type": "default", "rope_theta": 1e-300}, r"rope_theta' must be a number from 1 to 1e\+12, .* 1e-300$"),
        (LLAMA3_ROPE | {"high_freq_factor": float("nan")}, r"high_freq_factor' must be .*, found nan$"),
        (LLAMA3_ROPE | {"original_max_position_embeddings": 10**12}, "must be an integer from 1 to 1000000000, found"),
        ({"rope_type": 3}, r"'rope_scaling\.rope_type' must be a string"),
        (LLAMA3_ROPE | {"low_freq_factor": 4.0}, "low_freq_factor < high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ([1], r"'rope_scaling' must be an object"),
        ({"rope_type": "dynamic"}, r"required key 'rope_scaling\.factor' is missing"),
        ({"rope_type": "dynamic", "factor": 0.5}, r"'rope_scaling\.factor' must be a number from 1 to"),
        ({"rope_type": "yarn"}, r"required key 'rope_scaling\.factor' is missing"),
        (YARN_ROPE | {"rope_theta": 1}, "yarn rope needs a rope_theta above 1"),
        (YARN_ROPE | {"truncate": 1}, r"'rope_scaling\.truncate' must be true or false"),
        (YARN_ROPE | {"attention_factor": -1.0}, r"'rope_scaling\.attention_factor' must be a number from"),
        (YARN_ROPE | {"mscale": "1"}, r"'rope_scaling\.mscale' must be a number from 0"),
        (YARN_ROPE | {"original_max_position_embeddings": 0}, "original_max_position_embeddings' must be an integer"),
        ({"rope_type": "longrope"}, r"required key 'rope_scaling\.short_factor' is missing"),
        (long_rope(32) | {"long_factor": None}, r"required key 'rope_scaling\.long_factor' is missing"),
        (long_rope(32) | {"long_factor": [1.0] * 31}, r"long_factor' must be a list of 32 numbers, found 31$"),
        (long_rope(32) | {"short_factor": [0.0] * 32}, r"short_factor' must be a list of numbers from 1e-12 to 1e\+12"),
        (long_rope(32) | {"short_factor": 1.0}, r"short_factor' must be a list of numbers"),
        (long_rope(32) | {"original_max_position_embeddings": 1}, "longrope needs an original_max_position_embeddings"),
    ],
)
def test_wrong_numbers_are_refused(section: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parameters(rope_scaling=section)
