"""Decoders of transformers that we have no family for, served by its code with our attention."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, StableLmForCausalLM
from transformers.models.stablelm import modeling_stablelm

from tests.models.dense import prompt_logits
from tests.tiny_models import VOCAB_SIZE, save_any, save_llama
from vtoken.base.errors import CheckpointError
from vtoken.models import registry
from vtoken.models.kernels import COMPILED
from vtoken.models.layers import Linear
from vtoken.models.loader import load_model, read_limits
from vtoken.models.prepare import prepare_linears
from vtoken.models.probe import Unsuited, _window

FAMILIES: dict[str, dict[str, Any]] = {
    "StableLm": {},
    "GPTNeoX": {},
    "Olmo2": {},
    "Cohere": {},
    "Cohere2": {"num_hidden_layers": 4, "sliding_window": 9},
    "Granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "Starcoder2": {"sliding_window": 9},
    "SmolLM3": {"num_hidden_layers": 4},
    "Gemma2": {"num_hidden_layers": 2, "head_dim": 16, "query_pre_attn_scalar": 256, "sliding_window": 9},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = save_any(tmp_path_factory.mktemp(family), family, **FAMILIES[family])
        return made[family]

    return checkpoint


def tokens(count: int = 90) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, checkpoints: Callable[[str], Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(checkpoints(family), dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(tokens()[None]).logits[0]
    found = prompt_logits(load_model(checkpoints(family)), tokens())
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "windows", "soft_cap", "scale"),
    [
        ("StableLm", [None, None], None, 0.25),
        ("Starcoder2", [9, 9], None, 0.25),
        ("Cohere2", [9, 9, 9, None], None, 0.25),
        ("Gemma2", [9, None], 50.0, 1 / 16),  # a family of our own, run as if it were not
        ("Granite", [None, None], None, 0.2),
    ],
)
def test_what_layers_ask_of_attention_is_found_out(
    family: str,
    windows: list[int | None],
    soft_cap: float | None,
    scale: float,
    checkpoints: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(registry.BUILT_IN, "Gemma2ForCausalLM")
    spec = load_model(checkpoints(family)).spec
    assert (spec.num_heads, spec.head_dim, spec.max_position_embeddings) == (4, 16, 512)
    assert [layer.window for layer in spec.layers] == windows
    assert {(layer.soft_cap, layer.scale, layer.rotation) for layer in spec.layers} == {(soft_cap, scale, None)}


def test_stop_ids_are_those_of_config_and_generation_config(tmp_path: Path) -> None:
    folder = save_any(tmp_path / "model", "StableLm", eos_token_id=257, bos_token_id=256)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 257]}')
    spec = load_model(folder).spec
    assert (spec.eos_token_ids, spec.bos_token_id) == (frozenset({3, 257}), 256)


def test_the_user_is_told_in_one_line(
    checkpoints: Callable[[str], Path], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        load_model(checkpoints("StableLm"))
    assert [record.message for record in caplog.records if record.levelno >= logging.INFO] == [
        "StableLmForCausalLM is served by transformers' own code, with vtoken's attention and matrices: slower than a "
        "family of its own"
    ]
    assert "Loading weights" not in capfd.readouterr().err


def test_matrices_are_ours_and_can_be_prepared(checkpoints: Callable[[str], Path]) -> None:
    model = load_model(checkpoints("StableLm"), kernels=COMPILED)
    expected = prompt_logits(model, tokens(20))
    bytes_before = model.num_weight_bytes
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    assert model.flops_per_token == 2 * sum(
        module.in_features * module.out_features
        for module in model.modules()
        if isinstance(module, Linear) and module.out_features != VOCAB_SIZE
    )
    prepare_linears(model, backend="vtoken_f32")
    torch.testing.assert_close(prompt_logits(model, tokens(20)), expected, atol=1e-4, rtol=1e-4)
    assert model.num_weight_bytes == pytest.approx(bytes_before, rel=0.2)

    narrow = load_model(checkpoints("StableLm"), kernels=COMPILED)
    prepare_linears(narrow, quantization="int8")
    assert narrow.num_weight_bytes < bytes_before / 2
    assert (prompt_logits(narrow, tokens(20)) - expected).std() < 0.1 * expected.std()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["StableLm", "Olmoe", "Gemma2"])
def test_narrow_dtypes_follow_float32(dtype: str, family: str, checkpoints: Callable[[str], Path]) -> None:
    exact, narrow = load_model(checkpoints(family)), load_model(checkpoints(family), dtype)
    assert narrow.dtype == getattr(torch, dtype)
    expected = prompt_logits(exact, tokens(30))
    assert (prompt_logits(narrow, tokens(30)) - expected).abs().median() < 0.05 * expected.std()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"max_position_embeddings": None}, "has no number of positions"),
    "Mpt": (
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_position_embeddings": None},
        "has no number of positions",
    ),
    "Falcon": ({"alibi": True}, "do not attend by way of transformers' attention interface"),
    "GPTNeo": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "do not attend by way of transformers' attention interface",
    ),
    "XGLM": (
        {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 112},
        "do not attend by way of transformers' attention interface",
    ),
    "Mamba": ({}, "has layers of the kind linear_attention"),
    "T5": (
        {"d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        "is not supported; .* does not have it as a decoder that continues text",
    ),
    "GptOss": (
        {"num_local_experts": 4, "head_dim": 16},
        r"needs attention sinks \(s_aux\)",
    ),
    "DeepseekV3": (
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_group": 2,
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
        },
        "its keys have width 16 and its values 8",
    ),
    "Bert": ({"is_decoder": False}, "neither causal over the whole text nor over a sliding window"),
    "Bart": (
        {
            "d_model": 64,
            "decoder_layers": 2,
            "encoder_layers": 2,
            "decoder_attention_heads": 4,
            "encoder_attention_heads": 4,
        },
        "it takes no positions",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_attention_of_ours_cannot_do_is_refused(family: str, tmp_path: Path) -> None:
    settings, message = REFUSED[family]
    folder = save_any(tmp_path / "model", family, **settings)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(folder)
    assert "LlamaForCausalLM" in str(caught.value)  # what there is instead


ROPE = {"rope_theta": 10_000.0, "factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic"} | ROPE,
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 2,
            "long_factor": [2.0] * 2,
            "original_max_position_embeddings": 64,
        }
        | ROPE,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_that_depends_on_the_batch_is_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = save_any(tmp_path / "model", "StableLm", rope_parameters=rope | {"partial_rotary_factor": 0.25})
    with pytest.raises(CheckpointError, match=rf"its rope \({rope['rope_type']}\) depends on the longest text"):
        load_model(folder)


def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[nn.Module], forward: Callable[..., Any]) -> Path:
    """A StableLm in which one class does something else."""
    monkeypatch.setattr(cls, "forward", forward)
    return save_any(tmp_path / "model", "StableLm")


def test_a_model_that_mixes_tokens_elsewhere_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_stablelm.StableLmMLP.forward

    def mixing(self: nn.Module, x: Tensor) -> Tensor:
        return plain(self, x + 0.5 * x.roll(1, dims=1))

    folder = broken(tmp_path, monkeypatch, modeling_stablelm.StableLmMLP, mixing)
    with pytest.raises(CheckpointError, match="something beside attention mixes tokens"):
        load_model(folder)


def test_a_model_that_counts_positions_by_itself_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_stablelm.StableLmRotaryEmbedding.forward

    def counting(self: nn.Module, x: Tensor, position_ids: Tensor) -> Any:
        return plain(self, x, torch.arange(position_ids.shape[1])[None])

    folder = broken(tmp_path, monkeypatch, modeling_stablelm.StableLmRotaryEmbedding, counting)
    with pytest.raises(CheckpointError, match="positions are not those that it is given"):
        load_model(folder)


def test_a_bias_on_the_mask_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_stablelm.StableLmAttention.forward

    def biased(self: nn.Module, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask + torch.arange(attention_mask.shape[-1])
        return plain(self, *args, attention_mask=attention_mask, **kwargs)

    folder = broken(tmp_path, monkeypatch, modeling_stablelm.StableLmAttention, biased)
    with pytest.raises(CheckpointError, match="makes attention masks of its own"):
        load_model(folder)


def test_code_that_cannot_be_run_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("by accident")

    folder = broken(tmp_path, monkeypatch, modeling_stablelm.StableLmMLP, failing)
    with pytest.raises(CheckpointError, match=r"cannot be run as vtoken runs it \(ZeroDivisionError: by accident\)"):
        load_model(folder)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k >= 0,  # bidirectional
        lambda b, h, q, k: (k <= q) & (k // 16 == q // 16),  # chunks
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 4)),  # sinks
        lambda b, h, q, k: (k < q) & (k > q - 8),  # not itself
    ],
)
def test_other_masks_than_causal_ones_and_windows_are_refused(mask: Callable[..., Tensor]) -> None:
    with pytest.raises(Unsuited, match="neither causal over the whole text nor over a sliding window"):
        _window(mask, 100)


def test_windows_are_read_from_masks() -> None:
    assert _window(lambda b, h, q, k: k <= q, 100) is None
    assert _window(lambda b, h, q, k: (k <= q) & (k > q - 8), 100) == 8
    assert _window(lambda b, h, q, k: (k <= q) & (k > q - 100), 100) is None  # that is all there are


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_any(tmp_path / "model", "StableLm")


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    weights = load_file(folder / "model.safetensors") | changes
    save_file({name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors", {"format": "pt"})


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, f"tensors missing from the weights: {NORM}"),
        ({NORM: torch.ones(63)}, rf"tensors of another shape than config.json makes them: {NORM}"),
        ({NORM: torch.ones(64, dtype=torch.int8)}, f"'{NORM}' is stored as I8"),
        ({"model.layers.0.more": torch.ones(2)}, "in the weights, but not in the model .*: model.layers.0.more"),
    ],
    ids=["missing", "shape", "integers", "more"],
)
def test_weights_that_do_not_fill_the_model_are_refused(
    changes: dict[str, Tensor | None], message: str, checkpoint: Path
) -> None:
    rewrite(checkpoint, changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)


def test_masks_and_tables_in_old_checkpoints_are_no_weights(tmp_path: Path) -> None:
    folder = save_any(tmp_path / "model", "GPTNeoX")
    for i in (0, 1):
        name = f"gpt_neox.layers.{i}.attention."
        rewrite(folder, {name + "bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), name + "masked_bias": torch.ones(1)})
        rewrite(folder, {name + "rotary_emb.inv_freq": torch.ones(2)})
    load_model(folder)


def test_a_damaged_file_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"is short: its header says"):
        load_model(checkpoint)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["FooForCausalLM"], "model_type": "foo"},
            "architecture FooForCausalLM is not supported; vtoken's own are LlamaForCausalLM, .*, and what "
            "transformers has runs by its code, but transformers 5.* does not have it",
        ),
        ({"architectures": ["StableLmForSequenceClassification"]}, "not have it as a decoder that continues text"),
        ({"model_type": None}, "is not supported"),
        (
            {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "model_type": "evil", "architectures": ["Evil"]},
            "architecture Evil is not supported",
        ),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be an integer from 1, found 0"),
        (
            {"num_key_value_heads": 3},
            "tensors of another shape than config.json makes them: model.layers.0.self_attn.k",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_configs_are_refused(changes: dict[str, Any], message: str, checkpoint: Path) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)


def test_nothing_of_a_checkpoint_s_own_code_is_run(checkpoint: Path) -> None:
    (checkpoint / "modeling_evil.py").write_text("raise SystemExit('it ran')")
    edit_config(checkpoint, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"})
    assert load_model(checkpoint).spec.architecture == "StableLmForCausalLM"


def test_limits_are_told_without_weights(tmp_path: Path) -> None:
    for folder in (save_any(tmp_path / "a", "StableLm"), save_llama(tmp_path / "b")):
        (folder / "model.safetensors").unlink()
        limits = read_limits(folder)
        assert (limits.vocab_size, limits.max_position_embeddings) == (VOCAB_SIZE, 512)


def test_transformers_serves_its_own_models_as_before(checkpoints: Callable[[str], Path]) -> None:
    """Loading through us leaves nothing behind in the library."""
    load_model(checkpoints("StableLm"))
    theirs = StableLmForCausalLM.from_pretrained(checkpoints("StableLm"))
    assert theirs.config._attn_implementation == "sdpa"
    theirs(tokens(5)[None])
