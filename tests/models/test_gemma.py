"""Our Gemma 2 and 3 against transformers on tiny random weights, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.dense import assert_logits_of_transformers, assert_rows_stand_alone, prompt_logits
from tests.tiny_models import save_gemma2, save_gemma3
from vtoken.base.errors import CheckpointError
from vtoken.models.loader import load_model

TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}

VARIANTS: dict[str, Callable[[Path], Path]] = {
    "gemma3": save_gemma3,
    "gemma3-two-ropes": lambda f: save_gemma3(f, rope_parameters=TWO_ROPES),
    "gemma3-logit-cap": lambda f: save_gemma3(f, final_logit_softcapping=1.5),
    "gemma3-untied": lambda f: save_gemma3(f, tie_word_embeddings=False),
    "gemma3-biases": lambda f: save_gemma3(f, attention_bias=True),
    "gemma3-silu": lambda f: save_gemma3(f, hidden_activation="silu"),
    "gemma3-multi-query": lambda f: save_gemma3(f, num_key_value_heads=1),
    "gemma3-coarse-epsilon": lambda f: save_gemma3(f, rms_norm_eps=0.1),
    "gemma3-all-windowed": lambda f: save_gemma3(f, layer_types=["sliding_attention"] * 3),
    "gemma3-no-windows": lambda f: save_gemma3(f, layer_types=["full_attention"] * 3),
    "gemma3-every-sixth": lambda f: save_gemma3(f, layer_types=None, num_hidden_layers=7),
    "gemma3-sharded": lambda f: save_gemma3(f, max_shard_size="40KB"),
    "gemma2": save_gemma2,
    "gemma2-tight-caps": lambda f: save_gemma2(f, attn_logit_softcapping=1.0, final_logit_softcapping=1.5),
    "gemma2-no-caps": lambda f: save_gemma2(f, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma2-rope": lambda f: save_gemma2(f, rope_parameters=TWO_ROPES["full_attention"]),
    "gemma2-own-layers": lambda f: save_gemma2(
        f, layer_types=["full_attention", "sliding_attention", "full_attention"]
    ),
}


def edit_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    assert_logits_of_transformers(VARIANTS[variant](tmp_path / "model"))


def test_keys_of_the_time_before_transformers_5(tmp_path: Path) -> None:
    """As on the hub: a pattern instead of a list, two bases, scaling for the layers without a window."""
    folder = save_gemma3(tmp_path / "model", num_hidden_layers=4, layer_types=None)
    edit_config(
        folder,
        drop=("rope_parameters", "layer_types", "_sliding_window_pattern"),
        sliding_window_pattern=2,
        rope_theta=700.0,
        rope_local_base_freq=40.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    spec = load_model(folder).spec
    assert [(layer.window, layer.rotation) for layer in spec.layers] == [(9, 1), (None, 0)] * 2
    assert_logits_of_transformers(folder)


def test_what_google_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    folder = save_gemma3(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    edit_config(
        folder,
        drop=(
            *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters", "query_pre_attn_scalar"),
            *("rms_norm_eps", "hidden_activation", "attention_bias", "final_logit_softcapping", "sliding_window"),
        ),
    )
    assert load_model(folder).spec.layers[0].window == 4096
    assert_logits_of_transformers(folder, num_tokens=40)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees(prefix: str, tmp_path: Path) -> None:
    folder = save_gemma3(tmp_path / "model", eos_token_id=5)
    expected = prompt_logits(load_model(folder), torch.arange(30))
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    (folder / "config.json").write_text(json.dumps(whole | {"vision_config": {"hidden_size": 8}}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    outside = prefix.removesuffix("language_model.") if prefix.startswith("model.") else ""
    renamed[f"{outside}vision_tower.patch.weight"] = torch.ones(3)
    renamed[f"{outside}multi_modal_projector.norm.weight"] = torch.ones(3)
    save_file(renamed, folder / "model.safetensors")
    model = load_model(folder)
    assert torch.equal(prompt_logits(model, torch.arange(30)), expected)
    assert model.spec.eos_token_ids == {1, 5, 106}


@pytest.mark.parametrize("save", [save_gemma2, save_gemma3])
@pytest.mark.parametrize("batch", [[5], list(range(70)), [9] * 33], ids=len)
def test_a_token_does_not_feel_the_batch(batch: list[int], save: Callable[..., Path], tmp_path: Path) -> None:
    folder = save(tmp_path / "model", hidden_size=60, intermediate_size=53, final_logit_softcapping=2.0)
    assert_rows_stand_alone(load_model(folder), batch)


def test_a_bfloat16_model_rounds_where_transformers_does(tmp_path: Path) -> None:
    folder = save_gemma3(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model = load_model(folder, "bfloat16")
    assert model.dtype == torch.bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    token_ids = torch.arange(60)
    with torch.inference_mode():
        assert torch.equal(model.embed(token_ids, token_ids), theirs.model.embed_tokens(token_ids))
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert torch.equal(model.norm(x.clone()), theirs.model.norm(x))
        expected = theirs(token_ids[None]).logits[0].float()
    exact = prompt_logits(load_model(folder), token_ids)
    assert (prompt_logits(model, token_ids) - exact).std() < 1.5 * (expected - exact).std()


@pytest.mark.parametrize(
    ("save", "changes", "message"),
    [
        (save_gemma3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null for Gemma3ForCausalLM"),
        (save_gemma3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is true; only causal"),
        (save_gemma3, {"layer_types": ["full_attention"]}, "'layer_types' must name .* for each of 3 layers, found"),
        (save_gemma3, {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        (save_gemma3, {"layer_types": "full_attention"}, "'layer_types' must be a list of strings"),
        (save_gemma3, {"rope_parameters": {"rope_theta": 5.0}}, "must have a section full_attention and one sliding"),
        (save_gemma3, {"hidden_activation": "tanh"}, "hidden_activation 'tanh' is not supported for Gemma3ForCausalLM"),
        (save_gemma3, {"sliding_window": 0}, "'sliding_window' must be an integer from 1"),
        (save_gemma3, {"query_pre_attn_scalar": -1}, "'query_pre_attn_scalar' must be a number from"),
        (save_gemma3, {"rope_scaling": {"rope_type": "magic"}}, "rope type 'magic' is not supported"),
        (save_gemma2, {"attn_logit_softcapping": "50"}, "'attn_logit_softcapping' must be a number from"),
        (save_gemma2, {"final_logit_softcapping": 0}, "'final_logit_softcapping' must be a number from"),
    ],
)
def test_what_is_not_computed_is_refused(
    save: Callable[..., Path], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = edit_config(save(tmp_path / "model"), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)
