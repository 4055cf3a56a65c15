"""Reading config.json and generation_config.json: what is taken, and what is refused in which words (behaviour U91)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from vtoken.base.errors import CheckpointError
from vtoken.models.config import read_config, read_model_spec
from vtoken.models.spec import ModelSpec

NESTED = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def spec_of(folder: Path, generation: str | None = None, drop: str | None = None, **changes: Any) -> ModelSpec:
    config = {key: value for key, value in (CONFIG | changes).items() if key != drop}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    return read_model_spec(read_config(folder))


def test_the_usual_keys(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert (spec.architecture, spec.vocab_size, spec.hidden_size, spec.num_layers) == ("LlamaForCausalLM", 100, 64, 3)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_position_embeddings) == (4, 2, 16, 512)
    assert (spec.eos_token_ids, spec.bos_token_id) == (frozenset({2}), 1)
    assert len(spec.layers) == 3
    assert spec.layers[0].scale == 0.25
    assert spec.layers[0].window is None


def test_head_dim_of_the_config_wins(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, head_dim=32)
    assert (spec.head_dim, spec.layers[0].scale) == (32, 32**-0.5)
    assert spec_of(tmp_path, head_dim=None).head_dim == 16


def test_absent_kv_heads_mean_as_many_as_heads(tmp_path: Path) -> None:
    assert spec_of(tmp_path, drop="num_key_value_heads").num_kv_heads == 4
    assert spec_of(tmp_path, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "window"),
    [({"sliding_window": 9}, 9), ({"sliding_window": None}, None), ({}, 4096)],
)
def test_mistral_windows(changes: dict[str, Any], window: int | None, tmp_path: Path) -> None:
    """Absent is not null: transformers takes 4096 when the key is missing."""
    spec = spec_of(tmp_path, architectures=["MistralForCausalLM"], **changes)
    assert {layer.window for layer in spec.layers} == {window}


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (None, None, set()),
        (2, '{"eos_token_id": 7}', {2, 7}),
        (None, '{"eos_token_id": [2, 7]}', {2, 7}),
        ([2, 3], "{}", {2, 3}),
    ],
)
def test_stop_ids_are_the_union(in_config: Any, in_generation: str | None, expected: set[int], tmp_path: Path) -> None:
    assert spec_of(tmp_path, in_generation, eos_token_id=in_config).eos_token_ids == expected


@pytest.mark.parametrize(
    "generation",
    [
        "{broken",
        "[1]",
        NESTED,
        '{"eos_token_id": "</s>"}',
        '{"eos_token_id": [true]}',
        '{"eos_token_id": [3, 100]}',
        '{"eos_token_id": 1e400}',
    ],
    ids=["broken", "list", "nested", "text", "flag", "outside", "infinite"],
)
def test_a_broken_generation_config_is_a_warning(
    generation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert spec_of(tmp_path, generation).eos_token_ids == {2}
    assert "generation_config.json" in caplog.text


def test_the_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        read_config(tmp_path / "nowhere")


def test_the_folder_is_empty(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a Hugging Face checkpoint .*found nothing"):
        read_config(tmp_path)


def test_the_folder_holds_something_else(tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / f"photo{i}.png").touch()
    with pytest.raises(CheckpointError, match=r"found photo0\.png, .*photo4\.png, \.\.\.$"):
        read_config(tmp_path)


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        read_config(tmp_path / "x.safetensors")


def test_the_folder_has_an_impossible_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read \(File name too long\)"):
        read_config(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "not readable as JSON"),
        ("", "not readable as JSON"),
        ("[]", "expected a JSON object, found list"),
        (NESTED, r"not readable as JSON \(nested too deeply\)"),
        ('{"vocab_size": ' + "1" * 5000 + "}", r"not readable as JSON \(Exceeds the limit"),
    ],
    ids=["broken", "empty", "list", "nested", "digits"],
)
def test_the_config_is_broken(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_the_config_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x9d")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings"]
)
def test_a_required_key_is_missing(key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: required key '{key}' is missing"):
        spec_of(tmp_path, drop=key)
    with pytest.raises(CheckpointError, match=rf"config\.json: required key '{key}' is missing"):
        spec_of(tmp_path, **{key: None})


@pytest.mark.parametrize("value", ["64", 64.0, True, 0, -1, [64]])
def test_a_size_is_no_integer(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'hidden_size' must be an integer from 1 to 500000, found"):
        spec_of(tmp_path, hidden_size=value)


@pytest.mark.parametrize("value", [10**12, 10**400, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_an_absurd_size_is_refused_at_once(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"config\.json: '{key}' must be an integer from 1 to \d+, found"
    ) as caught:
        spec_of(tmp_path, **{key: value})
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_a_million_layers_are_not_spelled_out(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'num_hidden_layers' must be an integer from 1 to 1000, found 10000000"):
        spec_of(tmp_path, num_hidden_layers=10**7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 15}, "even head_dim, found 15"),
        ({"eos_token_id": "</s>"}, "must be a token id or a list of token ids from 0 to 99, found '</s>'"),
        ({"eos_token_id": 100}, "'eos_token_id' must be a token id .* from 0 to 99, found 100$"),
        (
            {"eos_token_id": [2, 2**40]},
            r"'eos_token_id' must be a token id .* from 0 to 99, found \[2, 1099511627776\]$",
        ),
        ({"bos_token_id": 100}, "'bos_token_id' must be a token id .* from 0 to 99, found 100$"),
        ({"bos_token_id": -1}, "'bos_token_id' must be a token id .* from 0 to 99, found -1$"),
        ({"architectures": []}, "'architectures' must be a list of class names"),
        ({"architectures": None}, "'architectures' must be a list of class names"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' must be a list of class names"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by 'awq' cannot be served; use"),
        ({"quantization_config": {"bits": 4}}, "quantised by 'unknown' cannot be served"),
    ],
)
def test_what_cannot_be_served(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(tmp_path, **changes)


def test_the_note_of_a_dequantised_gguf_is_no_quantisation(tmp_path: Path) -> None:
    note = {"quant_method": "gguf", "dequantize": False, "gguf_file": "x.Q4_1.gguf"}
    assert spec_of(tmp_path, quantization_config=note).hidden_size == 64
