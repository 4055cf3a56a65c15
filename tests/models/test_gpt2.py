"""Our GPT-2 against transformers on tiny random weights, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.dense import assert_logits_of_transformers, assert_rows_stand_alone, prompt_logits
from tests.tiny_models import VOCAB_SIZE, save_gpt2
from vtoken.base.errors import CheckpointError
from vtoken.models.loader import load_model

VARIANTS: dict[str, Callable[[Path], Path]] = {
    "plain": save_gpt2,
    "untied": lambda f: save_gpt2(f, tied=False),
    "inner-is-four-times-as-wide": lambda f: save_gpt2(f, n_inner=None),
    "odd": lambda f: save_gpt2(f, hidden_size=33, num_heads=3, n_inner=53),
    "gelu": lambda f: save_gpt2(f, activation_function="gelu"),
    "relu": lambda f: save_gpt2(f, activation_function="relu"),
    "silu": lambda f: save_gpt2(f, activation_function="silu"),
    "quick-gelu": lambda f: save_gpt2(f, activation_function="quick_gelu"),
    "gelu-fast": lambda f: save_gpt2(f, activation_function="gelu_fast"),
    "coarse-epsilon": lambda f: save_gpt2(f, layer_norm_epsilon=0.1),
    "unscaled": lambda f: save_gpt2(f, scale_attn_weights=False),
    "scaled-by-layer": lambda f: save_gpt2(f, scale_attn_by_inverse_layer_idx=True),
    "upcast": lambda f: save_gpt2(f, reorder_and_upcast_attn=True),
    "sharded": lambda f: save_gpt2(f, max_shard_size="40KB"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    assert_logits_of_transformers(VARIANTS[variant](tmp_path / "model"))


@pytest.mark.parametrize("batch", [[5], [0, 1, 2, 3], list(range(70)), [9] * 33], ids=len)
def test_a_token_does_not_feel_the_batch(batch: list[int], tmp_path: Path) -> None:
    folder = save_gpt2(tmp_path / "model", hidden_size=60, n_inner=53)
    assert_rows_stand_alone(load_model(folder), batch)


def test_the_names_of_the_public_checkpoint(tmp_path: Path) -> None:
    """It was saved without the head: no prefix, and the causal masks of its time among the weights."""
    whole = save_gpt2(tmp_path / "model")
    expected = prompt_logits(load_model(whole), torch.arange(9))
    path = whole / "model.safetensors"
    tensors: dict[str, Tensor] = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 512, 512).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["h.0.attn.bias"] = tensors["h.0.attn.bias"].bool()
    tensors["h.1.attn.bias"] = tensors["h.1.attn.bias"].byte()
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, path)
    assert torch.equal(prompt_logits(load_model(whole), torch.arange(9)), expected)


def test_both_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    path = save_gpt2(tmp_path / "model") / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"wte.weight": tensors["transformer.wte.weight"].clone()}, path)
    with pytest.raises(CheckpointError, match=r"hold 'transformer\.wte\.weight' and 'wte\.weight', which are the same"):
        load_model(tmp_path / "model")


def test_a_matrix_stored_the_other_way_is_refused(tmp_path: Path) -> None:
    path = save_gpt2(tmp_path / "model") / "model.safetensors"
    name = "transformer.h.1.mlp.c_fc.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].T.contiguous()}, path)
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[112, 64\], config\.json makes it \[64, 112\]"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_cross_attention": True}, "add_cross_attention is true, but attention to another"),
        ({"activation_function": "mish"}, "activation_function 'mish' is not supported for GPT2LMHeadModel; supported"),
        ({"n_head": 5}, "needs as many KV heads as heads, .* found 5 heads, 5 KV heads of 12 and a hidden size of 64"),
        ({"n_head": None}, "required key 'n_head' is missing"),
        ({"n_positions": 0}, "'n_positions' must be an integer from 1"),
        ({"n_inner": -1}, "'n_inner' must be an integer from 1"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_gpt2(tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "model")


def test_sizes_and_costs(tmp_path: Path) -> None:
    model = load_model(save_gpt2(tmp_path / "model"))
    assert (model.spec.head_dim, model.spec.num_kv_heads, model.spec.max_position_embeddings) == (16, 4, 512)
    assert all(layer.rotation is None for layer in model.spec.layers)
    assert model.rotations(torch.arange(3)) == ()
    matrices = 4 * 64 * 64 + 2 * 64 * 112
    assert model.flops_per_token == 2 * 3 * matrices
    assert model.num_parameters == (VOCAB_SIZE + 512 + 2) * 64 + 3 * (matrices + 9 * 64 + 112)
