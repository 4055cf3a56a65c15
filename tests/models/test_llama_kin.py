"""Families built like Llama, and every rope variant, against transformers on tiny random weights in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.dense import prompt_logits
from tests.tiny_models import (
    DYNAMIC_ROPE,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    VOCAB_SIZE,
    YARN_ROPE,
    long_rope,
    save_llama,
    save_mistral,
    save_phi3,
    save_qwen2,
    save_qwen3,
)
from vtoken.base.errors import CheckpointError
from vtoken.models.config import read_config, read_model_spec
from vtoken.models.loader import load_model

NUM_TOKENS = 90  # longer than the windows and than the lengths that ropes were trained for
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7}
PARTIAL: dict[str, Any] = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75}

VARIANTS: dict[str, Callable[[Path], Path]] = {
    "qwen2": save_qwen2,
    "qwen2-tied": lambda f: save_qwen2(f, tie_word_embeddings=True),
    "qwen2-multi-query": lambda f: save_qwen2(f, num_key_value_heads=1),
    "qwen2-head_dim-is-not-hidden-over-heads": lambda f: save_qwen2(f, head_dim=32),
    "qwen2-sharded": lambda f: save_qwen2(f, max_shard_size="40KB"),
    "qwen2-window": lambda f: save_qwen2(f, **WINDOW, max_window_layers=0),
    "qwen2-window-of-later-layers": lambda f: save_qwen2(f, **WINDOW, max_window_layers=1),
    "qwen2-window-of-named-layers": lambda f: save_qwen2(
        f, **WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen2-window-not-switched-on": lambda f: save_qwen2(f, sliding_window=7, max_window_layers=0),
    "qwen2-yarn": lambda f: save_qwen2(f, rope_parameters=YARN_ROPE),
    "qwen3": save_qwen3,
    "qwen3-tied": lambda f: save_qwen3(f, tie_word_embeddings=True),
    "qwen3-biases": lambda f: save_qwen3(f, attention_bias=True),
    "qwen3-default-head_dim": lambda f: save_qwen3(f, head_dim=128),
    "qwen3-odd": lambda f: save_qwen3(f, num_attention_heads=3, num_key_value_heads=1, hidden_size=36, head_dim=10),
    "qwen3-sharded": lambda f: save_qwen3(f, max_shard_size="40KB"),
    "qwen3-window": lambda f: save_qwen3(f, **WINDOW, max_window_layers=1),
    "qwen3-llama3": lambda f: save_qwen3(f, rope_parameters=LLAMA3_ROPE),
    "phi3": save_phi3,
    "phi3-tied": lambda f: save_phi3(f, tie_word_embeddings=True),
    "phi3-window": lambda f: save_phi3(f, sliding_window=7),
    "phi3-sharded": lambda f: save_phi3(f, max_shard_size="40KB"),
    "phi3-partial": lambda f: save_phi3(f, rope_parameters=dict(PARTIAL)),
    "phi3-partial-odd": lambda f: save_phi3(f, rope_parameters=PARTIAL | {"partial_rotary_factor": 0.7}),
    "phi3-longrope": lambda f: save_phi3(f, rope_parameters=long_rope(8), original_max_position_embeddings=64),
    "phi3-longrope-short": lambda f: save_phi3(f, rope_parameters=long_rope(8), original_max_position_embeddings=100),
    "phi3-longrope-partial": lambda f: save_phi3(
        f, rope_parameters=long_rope(6) | PARTIAL, original_max_position_embeddings=64
    ),
    "llama-linear": lambda f: save_llama(f, rope=LINEAR_ROPE),
    "llama-dynamic": lambda f: save_llama(f, rope=DYNAMIC_ROPE, max_position_embeddings=64),
    "llama-dynamic-short": lambda f: save_llama(f, rope=DYNAMIC_ROPE, max_position_embeddings=100),
    "llama-yarn": lambda f: save_llama(f, rope=YARN_ROPE),
    "llama-longrope": lambda f: save_llama(f, rope=long_rope(8)),
    "mistral-yarn-window": lambda f: save_mistral(f, sliding_window=9, rope=YARN_ROPE | {"truncate": False}),
}


def random_tokens(count: int) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    folder = VARIANTS[variant](tmp_path / "model")
    token_ids = random_tokens(NUM_TOKENS)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]

    found = prompt_logits(load_model(folder), token_ids)

    assert expected.std() > 0.1  # the logits say something, else closeness would not
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def change(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("switches", "windows"),
    [
        ({}, (None, None)),
        (WINDOW | {"max_window_layers": 0}, (7, 7)),
        (WINDOW | {"max_window_layers": 1}, (None, 7)),
        (WINDOW | {"max_window_layers": 2}, (None, None)),
        (WINDOW | {"sliding_window": None, "max_window_layers": 0}, (None, None)),
        (WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}, (7, None)),
        ({"layer_types": ["full_attention", "full_attention"]}, (None, None)),
    ],
)
@pytest.mark.parametrize("save", [save_qwen2, save_qwen3])
def test_windows_are_switched_on_by_layer(
    save: Callable[[Path], Path], switches: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    folder = change(save(tmp_path / "model"), **{"layer_types": None} | switches)
    assert tuple(layer.window for layer in read_model_spec(read_config(folder)).layers) == windows


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (WINDOW | {"layer_types": ["full_attention"]}, "each of 2 layers, found"),
        (WINDOW | {"layer_types": ["full_attention", "chunked_attention"]}, "full_attention or sliding_attention for"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "no sliding window is switched on"),
        ({"layer_types": "full_attention"}, "must be a list of strings"),
        ({"max_window_layers": -1}, "'max_window_layers' must be an integer from 0"),
        (WINDOW | {"sliding_window": 0}, "'sliding_window' must be an integer from 1"),
    ],
)
def test_windows_that_make_no_sense_are_refused(switches: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = change(save_qwen2(tmp_path / "model"), **{"layer_types": None} | switches)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_a_window_that_is_not_mentioned(tmp_path: Path) -> None:
    folder = save_phi3(tmp_path / "model", sliding_window=7)
    assert read_model_spec(read_config(folder)).layers[0].window == 7
    config = json.loads((folder / "config.json").read_text())
    for values in (config | {"sliding_window": None}, {k: v for k, v in config.items() if k != "sliding_window"}):
        (folder / "config.json").write_text(json.dumps(values))
        assert read_model_spec(read_config(folder)).layers[0].window is None


@pytest.mark.parametrize("partial", [0.01, 0, 1.5])
def test_a_part_of_a_head_that_makes_no_sense_is_refused(partial: float, tmp_path: Path) -> None:
    folder = change(save_phi3(tmp_path / "model"), rope_parameters=None, partial_rotary_factor=partial)
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        load_model(folder)


def test_a_missing_head_width_is_the_one_of_the_family(tmp_path: Path) -> None:
    folder = save_qwen3(tmp_path / "model", head_dim=128)
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).spec.head_dim == 128


def test_norms_of_heads_that_another_family_has_not_are_refused(tmp_path: Path) -> None:
    folder = change(save_qwen3(tmp_path / "model"), architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError, match=r"self_attn\.k_norm\.weight, .* in the weights, but not in the model"):
        load_model(folder)


@pytest.mark.parametrize("save", [save_qwen2, save_qwen3, save_phi3])
def test_other_activations_are_refused(save: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden_act must be 'silu'"):
        load_model(change(save(tmp_path / "model"), hidden_act="gelu"))


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "llama3"])
def test_phi3_has_no_other_rope_than_its_own(rope_type: str, tmp_path: Path) -> None:
    folder = change(
        save_phi3(tmp_path / "model"), rope_parameters=None, rope_scaling={"type": rope_type, "factor": 2.0}
    )
    with pytest.raises(
        CheckpointError, match=f"rope type '{rope_type}' is not supported for Phi3ForCausalLM; .*longrope"
    ):
        load_model(folder)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_calls_longrope_by_its_old_names(name: str, tmp_path: Path) -> None:
    plain = save_phi3(tmp_path / "plain", rope_parameters=long_rope(8), original_max_position_embeddings=64)
    old = save_phi3(tmp_path / "old", original_max_position_embeddings=64)
    factors = {key: value for key, value in long_rope(8).items() if key.endswith("_factor")}
    change(old, rope_parameters=None, rope_theta=10_000.0, rope_scaling={"type": name, **factors})
    token_ids = random_tokens(20)
    assert torch.equal(prompt_logits(load_model(old), token_ids), prompt_logits(load_model(plain), token_ids))


@pytest.mark.parametrize("save", [save_qwen2, save_qwen3, save_phi3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_follow_float32(save: Callable[[Path], Path], dtype: str, tmp_path: Path) -> None:
    folder, token_ids = save(tmp_path / "model"), random_tokens(30)
    expected = prompt_logits(load_model(folder), token_ids)
    assert (prompt_logits(load_model(folder, dtype), token_ids) - expected).std() < 0.05 * expected.std()
