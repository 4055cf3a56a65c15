"""Attention written down as plainly as can be: one sequence, all of it at once, nothing cached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from vtoken.attention.rotation import Rotation
from vtoken.models.base import Attend, CausalLM
from vtoken.models.loader import load_model
from vtoken.models.spec import ModelSpec


def split_heads(spec: ModelSpec, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
    """What a model hands to attention, as q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], turned."""
    heads = qkv.unflatten(-1, (-1, spec.head_dim))
    q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    return (q, k, v) if rotation is None else (rotation(q), rotation(k), v)


def dense_causal(
    model: CausalLM, num_tokens: int, died_at: Mapping[int, int] | None = None, total: int | None = None
) -> Attend:
    """Attend for tokens at positions 0, 1, ... of one sequence. A key that died at a length of the text is hidden from
    the queries at that position and after it. `total` is what the text may come to, if that is more."""
    spec, positions = model.spec, torch.arange(num_tokens)
    lengths = (
        None if spec.rope_lengths is None else torch.full_like(positions, spec.rope_lengths.of(total or num_tokens))
    )
    rotations = model.rotations(positions, lengths)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        facts = spec.layers[layer]
        q, k, v = split_heads(spec, qkv, facts.pick(rotations))
        group = spec.num_heads // spec.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * facts.scale
        if facts.soft_cap is not None:
            scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
        visible = distance >= 0 if facts.window is None else (distance >= 0) & (distance < facts.window)
        for position, length in (died_at or {}).items():
            visible[length:, position] = False
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, dim=1)).flatten(1)

    return attend


def prompt_logits(model: CausalLM, token_ids: Tensor) -> Tensor:
    """Logits [T, vocab_size] of a whole prompt in one go."""
    with torch.inference_mode():
        hidden = model.hidden_states(token_ids, torch.arange(len(token_ids)), dense_causal(model, len(token_ids)))
        return model.logits(hidden)


def assert_logits_of_transformers(folder: Path, num_tokens: int = 90) -> None:
    """A random prompt's logits in float32: ours within 1e-4 of those of transformers."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = load_model(folder)
    token_ids = torch.randint(0, model.spec.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
    found = prompt_logits(model, token_ids)
    assert expected.std() > 0.1  # the logits say something, else closeness would not
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def assert_rows_stand_alone(model: CausalLM, batch: list[int]) -> None:
    """Everything but attention: a token's bits are the same alone and among others, at any place in the batch."""
    token, position, spec = 42, 17, model.spec
    group = spec.num_heads // spec.num_kv_heads

    def run(token_ids: list[int], positions: list[int]) -> Tensor:
        rotations = model.rotations(torch.tensor(positions))

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = split_heads(spec, qkv, spec.layers[layer].pick(rotations))
            return (q + (k * v).repeat_interleave(group, dim=1)).flatten(1)  # whatever needs the row alone

        with torch.inference_mode():
            return model.logits(model.hidden_states(torch.tensor(token_ids), torch.tensor(positions), attend))

    alone = run([token], [position])[0]
    for place in {0, len(batch) // 2, len(batch)}:
        token_ids = [*batch[:place], token, *batch[place:]]
        positions = [position if i == place else i for i in range(len(token_ids))]
        assert torch.equal(run(token_ids, positions)[place], alone)
