"""Rotary tables against transformers, and what is refused (behaviour U19, the types that exist so far)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.tiny_models import LINEAR_ROPE, LLAMA3_ROPE
from vtoken.base.errors import CheckpointError
from vtoken.models.config import CheckpointConfig
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
}


@pytest.mark.parametrize("style", SCALED_STYLES)
def test_tables_equal_transformers(style: str) -> None:
    config = SCALED_STYLES[style]
    theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(CONFIG | config))))
    expected_cos, expected_sin = theirs(torch.zeros(1, dtype=torch.float32), POSITIONS[None])

    rope = parameters(**config)
    turn = RotaryEmbedding(rope, head_dim=64, max_positions=8192)(POSITIONS)

    assert torch.equal(inverse_frequencies(rope, 64), theirs.inv_freq)
    # They repeat the half; cos and sin themselves may differ in the last bit with the SIMD lane.
    torch.testing.assert_close(turn.cos, expected_cos[0, :, :32], atol=2e-7, rtol=0)
    torch.testing.assert_close(turn.sin, expected_sin[0, :, :32], atol=2e-7, rtol=0)


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


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic", "longrope", "foo"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_unknown_types_are_refused_by_name(rope_type: str, key: str, section: str) -> None:
    with pytest.raises(CheckpointError, match=rf"rope type '{rope_type}' .*supported are default, linear, llama3"):
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
    ],
)
def test_wrong_numbers_are_refused(section: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parameters(rope_scaling=section)
