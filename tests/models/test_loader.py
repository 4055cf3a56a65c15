"""Filling a model: everything there once, whole and of the right shape (behaviours U18, U54)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tests.models.dense import prompt_logits
from tests.tiny_models import VOCAB_SIZE, save_llama
from vtoken.base.errors import CheckpointError, ConfigError
from vtoken.models import layers
from vtoken.models.loader import load_model, resolve_dtype
from vtoken.models.shards import read_shard

TOKENS = torch.arange(12)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    return {
        "untied": save_llama(root / "untied"),
        "tied": save_llama(root / "tied", tied=True),
        "sharded": save_llama(root / "sharded", max_shard_size="50KB"),
    }


@pytest.fixture
def checkpoint(originals: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy to break, of the kind given as parameter ("untied" if none)."""
    return shutil.copytree(originals[getattr(request, "param", "untied")], tmp_path / "model")


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Set tensors of a single-file checkpoint; None removes."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 3
    return found


# Before loading: the files.


@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    missing = shards(checkpoint)[1]
    missing.unlink()
    with pytest.raises(CheckpointError, match=f"1 of .* shards .*missing: {missing.name}; download"):
        load_model(checkpoint)


@pytest.mark.parametrize("cut", [1, 1000])
@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
def test_a_short_shard_is_named_with_both_sizes(cut: int, checkpoint: Path) -> None:
    shard = shards(checkpoint)[2]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-cut])
    message = f"{shard.name} is short: its header says {len(whole)} bytes, found {len(whole) - cut}; download"
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)


def test_a_file_with_a_tail_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is too long"):
        load_model(checkpoint)


@pytest.mark.parametrize("checkpoint", ["untied", "sharded"], indirect=True)
def test_a_git_lfs_pointer_is_called_one(checkpoint: Path) -> None:
    pointer = next(checkpoint.glob("*.safetensors"))
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 4400\n")
    with pytest.raises(CheckpointError, match=r"is a git-LFS pointer .*git lfs pull"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole safetensors file: it has 0 bytes"),
        (b"1234567", "not a whole safetensors file: it has 7 bytes"),
        (b"<!DOCTYPE html>" * 10, "not a whole safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "not a whole safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "safetensors header: expected a JSON object, found list"),
        ((4).to_bytes(8, "little") + b"nope", "safetensors header: not readable as JSON"),
        ((10).to_bytes(8, "little") + b'{"a":null}', "safetensors header: tensor 'a' must have a dtype"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, r"safetensors header: .*\(nested too deeply\)"),
    ],
    ids=["empty", "7 bytes", "html", "cut", "list", "no json", "null", "nested"],
)
def test_an_unreadable_header_is_refused(content: bytes, message: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.* {message}"):
        load_model(checkpoint)


def test_a_header_that_contradicts_itself_is_refused(checkpoint: Path) -> None:
    entry = {"dtype": "F32", "shape": [3, 3], "data_offsets": [0, 32]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' of shape \[3, 3\] in F32 cannot take 32 bytes"):
        load_model(checkpoint)


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.bool, "BOOL")])
def test_quantised_tensors_are_refused(dtype: torch.dtype, name: str, checkpoint: Path) -> None:
    rewrite(checkpoint, {"model.norm.weight": torch.ones(64, dtype=dtype)})
    with pytest.raises(CheckpointError, match=rf"'model\.norm\.weight' is stored as {name}; supported are F64, F32"):
        load_model(checkpoint)


@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as JSON"),
        ("[" * 100_000, r"not readable as JSON \(nested too deeply\)"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "expected a 'weight_map' of file names, found None"),
        ('{"weight_map": 3}', "expected a 'weight_map' of file names, found 3"),
        ('{"weight_map": {"a": 5}}', "expected a 'weight_map' of file names, found {'a': 5}"),
    ],
    ids=["cut", "nested", "list", "empty", "number", "numbers"],
)
def test_a_broken_index_is_refused(text: str, message: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"index\.json: {message}"):
        load_model(checkpoint)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "", "no/such/folder"])
@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
def test_a_file_name_that_cannot_be_is_a_missing_shard(name: str, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"1 of .* shards .* are missing: {name}; download"):
        load_model(checkpoint)


# transformers looks for the single file first.


def test_beside_an_index_the_single_file_is_loaded_as_in_transformers(
    originals: dict[str, Path], checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in originals["sharded"].glob("model*"):
        shutil.copy(path, checkpoint)
    norm = torch.full((64,), 3.0)
    rewrite(checkpoint, {"model.norm.weight": norm})
    assert torch.equal(LlamaForCausalLM.from_pretrained(checkpoint).model.norm.weight, norm)
    assert torch.equal(load_model(checkpoint).get_parameter("norm.weight"), norm)
    assert "model.safetensors is loaded, as transformers does; the shards of model.safetensors.index" in caplog.text


@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
def test_a_shard_may_be_called_like_the_single_file(originals: dict[str, Path], checkpoint: Path) -> None:
    first = shards(checkpoint)[0]
    first.rename(checkpoint / "model.safetensors")
    path = checkpoint / "model.safetensors.index.json"
    path.write_text(path.read_text().replace(first.name, "model.safetensors"))
    assert torch.equal(
        prompt_logits(load_model(checkpoint), TOKENS), prompt_logits(load_model(originals["sharded"]), TOKENS)
    )


# Headers that safetensors refuses.


def write_shard(path: Path, header: dict[str, Any], num_bytes: int) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


def entry(shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {"a": entry([2], [0, 8]), "b": entry([2], [4, 12])},
            r"tensor 'b' starts at byte 4, expected 8 \(no gap, no over",
        ),
        ({"a": entry([1], [0, 4]), "b": entry([1], [8, 12])}, "tensor 'b' starts at byte 8, expected 4"),
        ({"a": entry([1], [8, 12])}, "tensor 'a' starts at byte 8, expected 0"),
        ({"a": entry([3.0], [0, 12])}, "tensor 'a' must have a dtype, a shape and two data_offsets, all integers >= 0"),
        ({"a": entry([3], [0.0, 12.0])}, "tensor 'a' must have"),
        ({"a": entry([True, 3], [0, 12])}, "tensor 'a' must have"),
        ({"a": entry([3], [-12, 0])}, "tensor 'a' must have"),
        ({"a": entry([-1, -3], [0, 12])}, "tensor 'a' must have"),
        ({"a": entry([3], [0, 12, 24])}, "tensor 'a' must have"),
        ({"a": entry("3", [0, 12])}, "tensor 'a' must have"),
        ({"a": [3]}, r"tensor 'a' must have .*found \[3\]"),
        ({"__metadata__": [1], "a": entry([3], [0, 12])}, "'__metadata__' must map names to strings"),
        ({"__metadata__": [], "a": entry([3], [0, 12])}, "'__metadata__' must map names to strings"),
        ({"__metadata__": {"format": 1}, "a": entry([3], [0, 12])}, "'__metadata__' must map names to strings"),
    ],
)
def test_a_header_that_safetensors_refuses_is_explained(header: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, header, num_bytes=12)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: safetensors header: {message}"):
        read_shard(path)


def test_whatever_else_safetensors_refuses_names_the_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    # Python's JSON takes the last of two equal keys.
    twice = content[8 : 8 + header_size].replace(b'"dtype":', b'"dtype":"F32","dtype":', 1)
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + content[8 + header_size :])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: safetensors cannot read it \(.*\); download it again"
    ):
        load_model(checkpoint)


@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
def test_an_index_that_names_the_wrong_shard_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    home = index["weight_map"]["model.norm.weight"]
    other = next(name for name in index["weight_map"].values() if name != home)
    index["weight_map"]["model.norm.weight"] = other
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"'model\.norm\.weight' should be in {other}, but is in {home}"):
        load_model(checkpoint)


@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
def test_a_tensor_in_two_shards_is_refused(checkpoint: Path) -> None:
    first, second = shards(checkpoint)[:2]
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is in both {first.name} and {second.name}"):
        load_model(checkpoint)


def test_only_pickles_is_a_way_out_not_a_crash(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found only PyTorch pickles \(pytorch_model\.bin\).*convert them once"):
        load_model(checkpoint)


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights; expected model\.safetensors or model\.safetensors\.index"):
        load_model(checkpoint)


# Before loading: names and shapes.


def test_missing_tensors_are_listed(checkpoint: Path) -> None:
    rewrite(checkpoint, {"model.layers.1.self_attn.k_proj.weight": None, "model.norm.weight": None})
    message = r"tensors model\.layers\.1\.self_attn\.k_proj\.weight, model\.norm\.weight are missing"
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)


def test_many_missing_tensors_are_counted(checkpoint: Path) -> None:
    set_config(checkpoint, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"and 13 more are missing"):
        load_model(checkpoint)


def test_unexpected_tensors_are_listed(checkpoint: Path) -> None:
    set_config(checkpoint, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.\S+ and 4 more are in the weights, but not in"):
        load_model(checkpoint)


def test_a_bias_that_the_config_does_not_mention_is_no_secret(checkpoint: Path) -> None:
    rewrite(checkpoint, {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is in the weights"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("model.layers.0.self_attn.k_proj.weight", [64, 64], [32, 64]),
        ("model.layers.1.mlp.up_proj.weight", [64, 112], [112, 64]),
        ("model.norm.weight", [1], [64]),
        ("lm_head.weight", [VOCAB_SIZE + 64, 64], [VOCAB_SIZE, 64]),
    ],
)
def test_a_wrong_shape_is_told_with_both(name: str, found: list[int], expected: list[int], checkpoint: Path) -> None:
    rewrite(checkpoint, {name: torch.zeros(found)})
    with pytest.raises(CheckpointError) as caught:
        load_model(checkpoint)
    assert f"tensor '{name}' has shape {found}, config.json makes it {expected}" in str(caught.value)


def test_tables_of_old_transformers_are_left_aside(checkpoint: Path) -> None:
    expected = prompt_logits(load_model(checkpoint), TOKENS)
    rewrite(checkpoint, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert torch.equal(prompt_logits(load_model(checkpoint), TOKENS), expected)


@pytest.mark.parametrize(
    "absurd",
    [
        {"vocab_size": 10**9},
        {"hidden_size": 500_000},
        {"intermediate_size": 10**9},
        {"num_attention_heads": 500_000, "num_key_value_heads": 500_000, "head_dim": 500_000},
        {"num_hidden_layers": 1000},
        {
            "vocab_size": 10**9,
            "hidden_size": 500_000,
            "intermediate_size": 10**9,
            "num_attention_heads": 500_000,
            "num_key_value_heads": 500_000,
            "head_dim": 500_000,
        },
    ],
    ids=lambda absurd: "-".join(absurd),
)
def test_sizes_are_held_against_the_files_before_memory_is_taken(absurd: dict[str, int], checkpoint: Path) -> None:
    """The largest that config.json may say: petabytes, if they were allocated."""
    set_config(checkpoint, **absurd)
    with pytest.raises(
        CheckpointError, match=r"has shape \[.*\], config\.json makes it \[|more are missing from the weig"
    ):
        load_model(checkpoint)


@pytest.mark.parametrize("eps", [1e-300, 1e300, 10**400, float("inf"), float("nan"), 0, "x"])
def test_an_absurd_epsilon_is_refused(eps: Any, checkpoint: Path) -> None:
    set_config(checkpoint, rms_norm_eps=eps)
    with pytest.raises(CheckpointError, match=r"config\.json: 'rms_norm_eps' must be a number from 1e-12 to 1, found"):
        load_model(checkpoint)


def test_what_does_not_fit_in_memory_is_said_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = layers.empty_parameter

    def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
        parameter = allocate(*shape, dtype=dtype)
        if parameter.device.type == "cpu":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return parameter

    monkeypatch.setattr(layers, "empty_parameter", empty_parameter)
    with pytest.raises(
        CheckpointError, match=r"KiB of weights and the rotary tables of 512 positions .* not fit in mem"
    ):
        load_model(checkpoint)


# After loading.


@pytest.mark.parametrize("checkpoint", ["untied", "tied", "sharded"], indirect=True)
def test_no_parameter_keeps_what_was_in_memory(checkpoint: Path) -> None:
    """Every element of every parameter equals the checkpoint's, found by another road than the loader's."""
    stored: dict[str, Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        stored |= load_file(path)
    model = load_model(checkpoint)
    state = dict(model.named_parameters())
    assert torch.equal(state["embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(state["norm.weight"], stored["model.norm.weight"])
    for i in range(2):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"):
            assert torch.equal(state[f"{ours}{name}.weight"], stored[f"{theirs}{name}.weight"])
        for fused, parts in (("self_attn.qkv_proj", ("q", "k", "v")), ("mlp.gate_up_proj", ("gate", "up"))):
            where = fused.split(".")[0]
            together = torch.cat([stored[f"{theirs}{where}.{part}_proj.weight"] for part in parts])
            assert torch.equal(state[f"{ours}{fused}.weight"], together)
    compared = 2 + 2 * 6
    is_tied = "lm_head.weight" not in stored
    assert len(state) == compared + (0 if is_tied else 1)
    if not is_tied:
        assert torch.equal(state["lm_head.weight"], stored["lm_head.weight"])


def test_sharded_and_single_files_make_the_same_model(originals: dict[str, Path]) -> None:
    single, sharded = load_model(originals["untied"]), load_model(originals["sharded"])
    assert torch.equal(prompt_logits(single, TOKENS), prompt_logits(sharded, TOKENS))


@pytest.mark.parametrize("checkpoint", ["tied"], indirect=True)
def test_tied_without_head_shares_one_tensor(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    stored = load_file(checkpoint / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert model.num_parameters == sum(tensor.numel() for tensor in stored.values())
    assert len(pointers) == len(list(model.parameters()))


@pytest.mark.parametrize("checkpoint", ["tied"], indirect=True)
def test_tied_with_an_equal_head_ignores_it(checkpoint: Path) -> None:
    plain = load_model(checkpoint)
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(checkpoint, {"lm_head.weight": embedding.clone()})
    model = load_model(checkpoint)
    assert model.num_parameters == plain.num_parameters
    assert torch.equal(prompt_logits(model, TOKENS), prompt_logits(plain, TOKENS))
    assert load_model(checkpoint, "bfloat16").num_parameters == plain.num_parameters


@pytest.mark.parametrize("checkpoint", ["tied"], indirect=True)
def test_tied_with_another_head_is_a_contradiction(checkpoint: Path) -> None:
    rewrite(checkpoint, {"lm_head.weight": torch.zeros(VOCAB_SIZE, 64)})
    with pytest.raises(CheckpointError, match=r"ties 'lm_head\.weight' to 'model\.embed_tokens\.weight', but "):
        load_model(checkpoint)


def test_untied_without_head_is_refused_with_the_way_out(checkpoint: Path) -> None:
    rewrite(checkpoint, {"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r'lm_head\.weight is missing.*"tie_word_embeddings": true'):
        load_model(checkpoint)
    set_config(checkpoint, tie_word_embeddings=True)
    assert load_model(checkpoint).num_parameters


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtypes_are_widened_to_float32(stored: torch.dtype, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    rewrite(checkpoint, {name: tensor.to(stored) for name, tensor in tensors.items()})
    model = load_model(checkpoint)
    assert model.dtype == torch.float32
    assert torch.equal(model.get_parameter("norm.weight"), tensors["model.norm.weight"].to(stored).float())


def test_activations_other_than_silu_are_refused(checkpoint: Path) -> None:
    set_config(checkpoint, hidden_act="gelu")
    with pytest.raises(CheckpointError, match="hidden_act must be 'silu' for LlamaForCausalLM, found 'gelu'"):
        load_model(checkpoint)


def test_dtype_names() -> None:
    assert resolve_dtype("auto") == resolve_dtype("float32") == torch.float32
    assert resolve_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype must be 'auto' or one of 'float32', .*found 'int9'"):
        resolve_dtype("int9")
