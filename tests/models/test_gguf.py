"""GGUF files become checkpoint folders: same numbers, once, whole or not at all (behaviour U91)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.models.gguf_files import save_gguf
from tests.tiny_models import BOS, EOS, save_llama, save_phi3, save_qwen2, save_qwen3
from vtoken.base.errors import CheckpointError
from vtoken.models import gguf
from vtoken.models.gguf import convert_gguf
from vtoken.models.gguf_worker import convert
from vtoken.models.loader import load_model
from vtoken.models.resolve import resolve_model

VOCAB_SIZE = 259  # the bytes, BOS, EOS and one merged token


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_converted_file_is_the_model_it_came_from(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Through the whole road: told, converted by a process of its own, kept."""
    original = save_llama(tmp_path / "original", vocab_size=VOCAB_SIZE, head_dim=32)
    path = save_gguf(original, tmp_path / "tiny.gguf")
    capfd.readouterr()

    folder = resolve_model(path)

    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "converting tiny.gguf" in told.err
    stored, expected = load_file(folder / "model.safetensors"), load_file(original / "model.safetensors")
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name
    spec = load_model(folder).spec
    assert (spec.head_dim, spec.max_position_embeddings, spec.eos_token_ids, spec.bos_token_id) == (32, 512, {EOS}, BOS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("ab", add_special_tokens=False) == [258]
    assert (folder / "config.json").stat().st_mode & 0o777 == (folder / "model.safetensors").stat().st_mode & 0o777


def add_window_and_padding(writer: GGUFWriter) -> None:
    writer.add_sliding_window(7)
    writer.add_pad_token_id(EOS)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_every_family_comes_through(architecture: str, tmp_path: Path) -> None:
    save, extra = {
        "llama": (partial(save_llama, tied=True), None),
        "qwen2": (save_qwen2, None),
        "qwen3": (partial(save_qwen3, head_dim=128), None),
        "phi3": (partial(save_phi3, sliding_window=7), add_window_and_padding),
    }[architecture]
    original = save(tmp_path / "original", vocab_size=VOCAB_SIZE)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(save_gguf(original, tmp_path / "tiny.gguf", architecture=architecture, extra=extra), folder)
    stored, expected = load_file(folder / "model.safetensors"), load_file(original / "model.safetensors")
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name
    found, wanted = load_model(folder).spec, load_model(original).spec
    assert replace(found, eos_token_ids=frozenset(), bos_token_id=None) == wanted
    assert (found.eos_token_ids, found.bos_token_id) == ({EOS}, BOS)


def test_a_file_is_converted_again_only_when_it_changed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []
    monkeypatch.setattr(gguf, "write_checkpoint", lambda path, folder: converted.append(path))
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    told: list[str] = []
    first = convert_gguf(path, told.append)
    assert convert_gguf(path, told.append) == first
    assert first.parent == cache / "gguf"
    assert (len(converted), len(told)) == (1, 1)
    os.utime(path, ns=(0, 0))
    assert convert_gguf(path, told.append) != first
    assert len(converted) == 2


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(20, id="header", marks=pytest.mark.slow),
        pytest.param(700, id="keys", marks=pytest.mark.slow),
        pytest.param(-5000, id="tensors"),
    ],
)
def test_a_cut_file_is_called_damaged_and_leaves_nothing(kept: int, tmp_path: Path, cache: Path) -> None:
    """Through the whole road: process, reason, clean-up."""
    path = save_gguf(save_llama(tmp_path / "original", vocab_size=VOCAB_SIZE), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        CheckpointError, match=r"tiny\.gguf cannot be converted: .* damaged or incomplete; get it again"
    ):
        convert_gguf(path)
    assert list((cache / "gguf").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs.github.com/spec/v1\n", b"\x00" * 100])
def test_what_is_no_gguf_is_refused_at_once(content: bytes, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.gguf is not a GGUF file: it starts with"):
        convert_gguf(path)
    assert list((cache / "gguf").iterdir()) == []


def add_rope_factors(name: str) -> Callable[[GGUFWriter], object]:
    return lambda writer: writer.add_tensor(name, np.full(8, 8.0, dtype=np.float32))


def add_part_of_a_head(writer: GGUFWriter) -> None:
    for key, value in {"rope.dimension_count": 12, "attention.head_count": 4, "embedding_length": 64}.items():
        writer.add_uint32(f"phi3.{key}", value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda writer: writer.add_rope_scaling_type(RopeScalingType.YARN), "rope scaling 'yarn' in GGUF files"),
        (add_rope_factors("rope_freqs.weight"), r"rope frequency factors \(Llama 3\.1, long Phi\) in GGUF files"),
        (add_rope_factors("rope_factors_long.weight"), r"rope frequency factors .* in GGUF files"),
        (add_part_of_a_head, "rope of part of a head .* in GGUF files"),
    ],
    ids=["yarn", "llama3", "longrope", "partial"],
)
def test_scaled_rope_is_refused(extra: object, message: str, tmp_path: Path) -> None:
    """transformers would read these files and leave the scaling out."""
    checkpoint = save_llama(tmp_path / "original", vocab_size=VOCAB_SIZE)
    path = save_gguf(checkpoint, tmp_path / "tiny.gguf", extra=extra)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        convert(path, tmp_path)


def test_other_architectures_are_refused_before_the_weights(tmp_path: Path) -> None:
    checkpoint = save_llama(tmp_path / "original", vocab_size=VOCAB_SIZE)
    path = save_gguf(checkpoint, tmp_path / "tiny.gguf", architecture="starcoder2")
    with pytest.raises(
        CheckpointError, match="architecture Starcoder2ForCausalLM is not supported; supported are Llama"
    ):
        convert(path, tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "file"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"cache cannot be written .*set VTOKEN_CACHE"):
        convert_gguf(tmp_path / "x.gguf")
