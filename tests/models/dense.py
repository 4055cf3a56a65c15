"""Attention written down as plainly as can be: one sequence, all of it at once, nothing cached."""

from __future__ import annotations

import torch
from torch import Tensor

from vtoken.models.base import Attend, CausalLM
from vtoken.models.spec import ModelSpec


def dense_causal(spec: ModelSpec) -> Attend:
    """Attend for tokens at positions 0, 1, ... of one sequence."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        facts = spec.layers[layer]
        group = spec.num_heads // spec.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * facts.scale
        distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
        visible = distance >= 0 if facts.window is None else (distance >= 0) & (distance < facts.window)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, dim=1))

    return attend


def prompt_logits(model: CausalLM, token_ids: Tensor) -> Tensor:
    """Logits [T, vocab_size] of a whole prompt in one go."""
    with torch.inference_mode():
        hidden = model.hidden_states(token_ids, torch.arange(len(token_ids)), dense_causal(model.spec))
        return model.logits(hidden)
