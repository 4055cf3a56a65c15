"""Mixtral and Qwen 3's mixtures of experts, against transformers on tiny random weights in float32."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.dense import assert_rows_stand_alone, prompt_logits
from tests.tiny_models import VOCAB_SIZE, save_any
from vtoken import LLM, SamplingParams
from vtoken.base.errors import CheckpointError
from vtoken.linear.base import PreparedLinear
from vtoken.models.experts import SparseMLP
from vtoken.models.kernels import COMPILED
from vtoken.models.layers import GatedMLP, Linear
from vtoken.models.loader import load_model
from vtoken.models.prepare import prepare_linears


def save_mixtral(folder: Path, **config: Any) -> Path:
    return save_any(folder, "Mixtral", **{"num_local_experts": 5} | config)


def save_qwen3_moe(folder: Path, **config: Any) -> Path:
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24}
    return save_any(folder, "Qwen3Moe", **sizes | config)


WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7}

VARIANTS: dict[str, Callable[[Path], Path]] = {
    "mixtral": save_mixtral,
    "mixtral-window": lambda f: save_mixtral(f, sliding_window=7),
    "mixtral-one-of-five": lambda f: save_mixtral(f, num_experts_per_tok=1),
    "mixtral-all-of-five": lambda f: save_mixtral(f, num_experts_per_tok=5),
    "mixtral-tied": lambda f: save_mixtral(f, tie_word_embeddings=True),
    "mixtral-odd": lambda f: save_mixtral(f, hidden_size=36, intermediate_size=52, head_dim=10),
    "qwen3-moe": save_qwen3_moe,
    "qwen3-moe-renormalised": lambda f: save_qwen3_moe(f, norm_topk_prob=True),
    "qwen3-moe-every-second": lambda f: save_qwen3_moe(f, decoder_sparse_step=2, num_hidden_layers=4),
    "qwen3-moe-some-dense": lambda f: save_qwen3_moe(f, mlp_only_layers=[0]),
    "qwen3-moe-biases": lambda f: save_qwen3_moe(f, attention_bias=True),
    "qwen3-moe-window": lambda f: save_qwen3_moe(f, **WINDOW),
    "qwen3-moe-window-not-switched-on": lambda f: save_qwen3_moe(f, sliding_window=7),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    folder = VARIANTS[variant](tmp_path / "model")
    token_ids = torch.randint(0, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(7))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
    model = load_model(folder)
    assert type(model).__module__ in ("vtoken.models.mixtral", "vtoken.models.qwen")
    assert expected.std() > 0.1
    torch.testing.assert_close(prompt_logits(model, token_ids), expected, atol=1e-4, rtol=0)

    compiled = load_model(folder, kernels=COMPILED)
    prepare_linears(compiled, backend="vtoken_f32")
    torch.testing.assert_close(prompt_logits(compiled, token_ids), expected, atol=1e-4, rtol=0)


def test_a_checkpoint_has_the_names_of_public_ones(tmp_path: Path) -> None:
    """Those of mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B, which transformers 5 writes too."""
    mixtral = load_file(save_mixtral(tmp_path / "a") / "model.safetensors")
    assert mixtral["model.layers.1.block_sparse_moe.gate.weight"].shape == (5, 64)
    assert mixtral["model.layers.1.block_sparse_moe.experts.4.w2.weight"].shape == (64, 112)
    qwen = load_file(save_qwen3_moe(tmp_path / "b") / "model.safetensors")
    assert qwen["model.layers.1.mlp.gate.weight"].shape == (6, 64)
    assert qwen["model.layers.1.mlp.experts.5.down_proj.weight"].shape == (64, 40)


def change(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return folder


def test_either_name_of_the_number_of_experts_is_read(tmp_path: Path) -> None:
    folder = save_qwen3_moe(tmp_path / "model")
    assert "num_local_experts" in json.loads((folder / "config.json").read_text())
    load_model(change(folder, num_local_experts="absent", num_experts=6))


def test_what_the_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    folder = save_mixtral(tmp_path / "model", num_local_experts=8)
    left_out = ("num_local_experts", "num_experts_per_tok", "rms_norm_eps", "sliding_window", "rope_parameters")
    change(folder, **dict.fromkeys(left_out, "absent"))
    token_ids = torch.arange(30)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(token_ids[None]).logits[0]
    torch.testing.assert_close(prompt_logits(load_model(folder), token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok \(6\) must be at most num_local_experts \(5\)"),
        ({"num_experts_per_tok": 0}, "'num_experts_per_tok' must be an integer from 1"),
        ({"num_local_experts": 4}, r"tensors? .*block_sparse_moe.experts.4.* in the weights, but not in the model"),
        ({"num_local_experts": 6}, r"block_sparse_moe.experts.5.* missing from the weights"),
        ({"num_local_experts": 10**9}, "'num_local_experts' must be an integer from 1 to 10000"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' for MixtralForCausalLM"),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = change(save_mixtral(tmp_path / "model"), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize("layers", [[-1], [True], "0", [0.5]])
def test_a_bad_list_of_dense_layers_is_refused(layers: object, tmp_path: Path) -> None:
    folder = change(save_qwen3_moe(tmp_path / "model"), mlp_only_layers=layers)
    with pytest.raises(CheckpointError, match="'mlp_only_layers' must be a list of integers from 0"):
        load_model(folder)


@pytest.mark.parametrize("batch", [[5], [0, 1, 2, 3], list(range(70))], ids=len)
def test_a_token_does_not_feel_the_batch(batch: list[int], tmp_path: Path) -> None:
    folder = save_mixtral(tmp_path / "model", hidden_size=60, head_dim=14, intermediate_size=53)
    assert_rows_stand_alone(load_model(folder), batch)


def test_operations_are_those_of_the_experts_of_a_token(tmp_path: Path) -> None:
    few = load_model(save_mixtral(tmp_path / "a", num_local_experts=3))
    many = load_model(save_mixtral(tmp_path / "b", num_local_experts=7))
    expert, router = 3 * 64 * 112, 64
    assert many.flops_per_token - few.flops_per_token == 2 * 2 * 4 * router
    assert many.num_parameters - few.num_parameters == 2 * 4 * (expert + router)


def test_quantisation_leaves_routers_alone(tmp_path: Path) -> None:
    model = load_model(save_mixtral(tmp_path / "model"), kernels=COMPILED)
    routers = [module.gate for module in model.modules() if isinstance(module, SparseMLP)]
    before = [router.weight.clone() for router in routers if router.weight is not None]
    experts = [module.down_proj for module in model.modules() if isinstance(module, GatedMLP)]
    expert_before = experts[0].weight
    assert expert_before is not None
    prepare_linears(model, quantization="int8")

    def kept(linear: Linear) -> Tensor:
        prepared = linear.prepared
        assert isinstance(prepared, PreparedLinear)
        return prepared(torch.eye(linear.in_features)).T

    assert len(before) == 2
    for router, weight in zip(routers, before, strict=True):
        assert torch.equal(kept(router), weight)
    assert not torch.equal(kept(experts[0]), expert_before)


def test_nothing_is_replayed_and_nothing_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other tokens go to other experts: a tape of one step is of no use to the next."""
    folder = save_mixtral(tmp_path / "model")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with (
        caplog.at_level(logging.WARNING, "vtoken"),
        LLM(str(folder), num_blocks=10, max_model_len=64, skip_tokenizer_init=True) as llm,
    ):
        llm.generate([[1, 2, 3]], params)
        assert not llm.engine.executor._runner._replays._recorded
    assert not caplog.records


def test_a_model_whose_layers_are_all_dense_is_replayed(tmp_path: Path) -> None:
    assert load_model(save_qwen3_moe(tmp_path / "a", mlp_only_layers=[0, 1])).is_replayable
    assert not load_model(save_qwen3_moe(tmp_path / "b", mlp_only_layers=[0])).is_replayable
