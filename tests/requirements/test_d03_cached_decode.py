"""D3: cached decode equals uncached, on a real (tiny, random) Llama and Mistral."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.plans import Lane, Slice, make_plan
from tests.tiny_models import save_llama, save_mistral
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.reference import ReferenceAttention
from vtoken.models.base import CausalLM
from vtoken.models.loader import load_model
from vtoken.planner.kv_memory import KVShape
from vtoken.worker.kv_store import KVStore

BLOCK_SIZE = 7
PROMPT = [(7 * i * i + 3) % 256 for i in range(40)]


def llama(folder: Path) -> Path:
    return save_llama(folder)


def mistral(folder: Path) -> Path:
    return save_mistral(folder, sliding_window=12)


class Session:
    """One sequence on one store; returns the logits after every token."""

    def __init__(self, model: CausalLM) -> None:
        spec = model.spec
        self.model, self.backend = model, ReferenceAttention()
        shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, "float32")
        self.store = KVStore(shape, num_blocks=20, block_size=BLOCK_SIZE)
        self.lane = Lane(BLOCK_SIZE, [13, 2, 19, 0, 7, 4, 11, 3, 16, 5])

    @torch.inference_mode()
    def feed(self, token_ids: list[int]) -> Tensor:
        """[T, vocab_size]"""
        part = Slice(self.lane, token_ids)
        plan = make_plan([part])
        meta, slots = AttentionMetadata.from_plan(plan), torch.from_numpy(plan.write_slots)
        positions = torch.from_numpy(meta.positions)
        rotations = self.model.rotations(positions)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            spec, cache = self.model.spec.layers[layer], self.store.layers[layer]
            heads = self.backend.write(qkv, spec.pick(rotations), cache, slots)
            return self.backend.attend(spec, *heads, cache, meta).flatten(1)

        hidden = self.model.hidden_states(torch.tensor(token_ids), positions, attend)
        part.commit()
        return self.model.logits(hidden)


@pytest.mark.parametrize("save", [llama, mistral])
def test_cached_decode_equals_uncached(save: Callable[[Path], Path], tmp_path: Path) -> None:
    model = load_model(save(tmp_path / "model"))
    cached, tokens = Session(model), list(PROMPT)
    logits = cached.feed(tokens)[-1]
    for _ in range(20):
        uncached = Session(model).feed(tokens)[-1]  # everything again, nothing kept
        assert torch.equal(logits, uncached)
        tokens.append(int(logits.argmax()))
        logits = cached.feed(tokens[-1:])[-1]
    assert len(set(tokens[len(PROMPT) :])) > 3, "an answer that repeats itself hides errors"


def test_chunked_prompt_equals_whole(tmp_path: Path) -> None:
    model = load_model(llama(tmp_path / "model"))
    whole, chunked = Session(model).feed(PROMPT), Session(model)
    parts = [chunked.feed(PROMPT[begin : begin + 9]) for begin in range(0, len(PROMPT), 9)]
    assert torch.equal(torch.cat(parts), whole)
