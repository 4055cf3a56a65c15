"""Our OPT against transformers on tiny random weights, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.dense import assert_logits_of_transformers, assert_rows_stand_alone, prompt_logits
from tests.tiny_models import save_opt
from vtoken.base.errors import CheckpointError
from vtoken.models.loader import load_model

VARIANTS: dict[str, Callable[[Path], Path]] = {
    "norms-first": save_opt,
    "norms-last": lambda f: save_opt(f, do_layer_norm_before=False),
    "narrow-embeddings": lambda f: save_opt(f, word_embed_proj_dim=24),
    "opt-350m": lambda f: save_opt(f, do_layer_norm_before=False, word_embed_proj_dim=24),
    "untied": lambda f: save_opt(f, tied=False),
    "gelu": lambda f: save_opt(f, activation_function="gelu"),
    "without-biases": lambda f: save_opt(f, enable_bias=False),
    "norms-without-weights": lambda f: save_opt(f, layer_norm_elementwise_affine=False),
    "without-the-last-norm": lambda f: save_opt(f, _remove_final_layer_norm=True),
    "odd": lambda f: save_opt(f, hidden_size=33, num_heads=3, ffn_dim=53),
    "sharded": lambda f: save_opt(f, max_shard_size="40KB"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    assert_logits_of_transformers(VARIANTS[variant](tmp_path / "model"))


@pytest.mark.parametrize("do_layer_norm_before", [True, False])
@pytest.mark.parametrize("batch", [[5], list(range(70))], ids=len)
def test_a_token_does_not_feel_the_batch(batch: list[int], do_layer_norm_before: bool, tmp_path: Path) -> None:
    folder = save_opt(
        tmp_path / "model", hidden_size=60, do_layer_norm_before=do_layer_norm_before, word_embed_proj_dim=23
    )
    assert_rows_stand_alone(load_model(folder), batch)


def test_the_last_position_has_a_row(tmp_path: Path) -> None:
    assert_logits_of_transformers(save_opt(tmp_path / "model", max_position_embeddings=33), num_tokens=33)


def test_names_without_the_prefix(tmp_path: Path) -> None:
    whole = save_opt(tmp_path / "model")
    expected = prompt_logits(load_model(whole), torch.arange(9))
    path = whole / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    assert torch.equal(prompt_logits(load_model(whole), torch.arange(9)), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "tanh"}, "activation_function 'tanh' is not supported for OPTForCausalLM; supported"),
        ({"num_attention_heads": 7}, "found 7 heads, 7 KV heads of 9 and a hidden size of 64"),
        ({"num_key_value_heads": 2}, "found 4 heads, 2 KV heads of 16 and a hidden size of 64"),
        ({"ffn_dim": None}, "required key 'ffn_dim' is missing"),
        ({"do_layer_norm_before": 1}, "'do_layer_norm_before' must be true or false, found 1"),
        ({"word_embed_proj_dim": 32}, "model.decoder.project_in.weight, model.decoder.project_out.weight are missing"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_opt(tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "model")
