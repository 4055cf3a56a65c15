"""Our Llama against transformers on tiny random weights, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models.dense import assert_logits_of_transformers, assert_rows_stand_alone, prompt_logits
from tests.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, VOCAB_SIZE, save_llama, save_mistral
from vtoken.models.loader import load_model

VARIANTS: dict[str, Callable[[Path], Path]] = {
    "grouped": save_llama,
    "multi-head": lambda f: save_llama(f, num_kv_heads=4),
    "multi-query": lambda f: save_llama(f, num_kv_heads=1),
    "head_dim-is-not-hidden-over-heads": lambda f: save_llama(f, head_dim=32),
    "odd": lambda f: save_llama(f, hidden_size=36, num_heads=3, num_kv_heads=1, head_dim=10, intermediate_size=53),
    "tied": lambda f: save_llama(f, tied=True),
    "biases": lambda f: save_llama(f, attention_bias=True, mlp_bias=True),
    "rope-linear": lambda f: save_llama(f, rope=LINEAR_ROPE),
    "rope-llama3": lambda f: save_llama(f, rope=LLAMA3_ROPE),
    "sharded": lambda f: save_llama(f, max_shard_size="40KB"),
    "sharded-tied": lambda f: save_llama(f, tied=True, max_shard_size="40KB"),
    "mistral-window": lambda f: save_mistral(f, sliding_window=7),
    "mistral-without-window": lambda f: save_mistral(f, sliding_window=None),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    # 90 tokens: longer than the windows and than the first turn of the scaled frequencies.
    assert_logits_of_transformers(VARIANTS[variant](tmp_path / "model"), num_tokens=90)


def test_the_window_counts_in_those_logits(tmp_path: Path) -> None:
    """The comparison above would not notice a window that is never reached; this one is."""
    token_ids = torch.arange(20)
    windowed = load_model(save_mistral(tmp_path / "a", sliding_window=7))
    full = load_model(save_mistral(tmp_path / "b", sliding_window=None))
    assert windowed.spec.layers[0].window == 7
    assert full.spec.layers[0].window is None
    first, second = prompt_logits(windowed, token_ids), prompt_logits(full, token_ids)
    torch.testing.assert_close(first[:7], second[:7])
    assert not torch.allclose(first[7:], second[7:], atol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_follow_float32(dtype: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    token_ids = torch.arange(30)
    exact, narrow = load_model(folder), load_model(folder, dtype)
    assert narrow.dtype == getattr(torch, dtype)
    assert narrow.num_weight_bytes == exact.num_weight_bytes // 2
    logits = prompt_logits(narrow, token_ids)
    assert logits.dtype == torch.float32
    expected = prompt_logits(exact, token_ids)
    assert (logits - expected).std() < 0.05 * expected.std()


def test_parameters_are_counted_with_the_tie_once(tmp_path: Path) -> None:
    untied = load_model(save_llama(tmp_path / "a"))
    tied = load_model(save_llama(tmp_path / "b", tied=True))
    assert untied.num_parameters - tied.num_parameters == VOCAB_SIZE * 64
    attention = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64
    assert tied.flops_per_token == untied.flops_per_token == 2 * 2 * (attention + 3 * 64 * 112)


@pytest.mark.parametrize("batch", [[5], [0, 1, 2, 3], list(range(70)), [9] * 33], ids=len)
def test_a_token_does_not_feel_the_batch(batch: list[int], tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model", hidden_size=60, head_dim=14, intermediate_size=53)
    assert_rows_stand_alone(load_model(folder), batch)
