"""Models whose rotary embedding depends on a sequence's length, through the engine, held against transformers.

There the factor changes while a text grows, and keys that were cached before keep the old one. Ours is fixed by what
the request can come to, so transformers is told that length beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.recorded import Demand, Recording, record, scattered
from tests.models.dense import dense_causal
from tests.tiny_models import DYNAMIC_ROPE, VOCAB_SIZE, long_rope, save_llama, save_phi3
from vtoken import LLM, SamplingParams
from vtoken.attention.rotation import Rotation
from vtoken.models.loader import load_model
from vtoken.worker.runner import ModelRunner

ORIGINAL = 40

MODELS: dict[str, Callable[[Path], Path]] = {
    "longrope": lambda folder: save_phi3(
        folder,
        rope_parameters=long_rope(6) | {"partial_rotary_factor": 0.75},
        original_max_position_embeddings=ORIGINAL,
    ),
    "dynamic": lambda folder: save_llama(folder, rope=DYNAMIC_ROPE, max_position_embeddings=ORIGINAL),
}

MEMORIES: dict[str, dict[str, Any]] = {
    "alone": {"num_blocks": 100, "max_num_seqs": 1, "max_num_batched_tokens": 1000},
    "small chunks": {"num_blocks": 100, "max_num_batched_tokens": 16},
    "recompute": {"num_blocks": 12, "max_num_batched_tokens": 64},
    "swap": {"num_blocks": 12, "preemption": "swap", "swap_space": "1MiB"},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


def demands() -> list[Demand]:
    """Texts that begin alike and come to lengths on both sides of the original one, some to the same."""
    shared = np.random.default_rng(3).integers(0, VOCAB_SIZE, 33).tolist()
    sizes = [(20, 20), (20, 21), (33, 7), (33, 8), (33, 40), (33, 40), (5, 60), (17, 36)]
    prompts = [(shared[:prompt], new) for prompt, new in sizes] + [([*shared, 7, 8, 9, 10, 11, 12, 13, 14, 15], 20)]
    return [Demand(prompt, i, {"max_tokens": new, "temperature": 0.0}) for i, (prompt, new) in enumerate(prompts)]


def told_its_length(folder: Path, total: int) -> PreTrainedModel:
    """transformers' model, which turns everything as it would at the end of a text of `total` tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rotary = model.model.rotary_emb
    if total > ORIGINAL:
        rotary.original_max_seq_len = 0  # texts that are shorter than that would set it back
        rotary(torch.zeros(1), torch.tensor([[total - 1]]))
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return model


def expected(folder: Path, demand: Demand) -> tuple[list[int], Tensor]:
    """Greedy tokens, and the logits [tokens, vocab_size] they were drawn from."""
    new = demand.params["max_tokens"]
    model = told_its_length(folder, len(demand.prompt) + new)
    tokens = list(demand.prompt)
    with torch.inference_mode():
        for _ in range(new):
            logits = model(torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(demand.prompt) :], logits[len(demand.prompt) - 1 :]


def logits_of(ours: Recording, seed: int, count: int) -> np.ndarray:
    return np.stack([np.frombuffer(ours.bits[seed, 0, index], np.float32) for index in range(count)])


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[tuple[list[int], Tensor]]:
    found = [expected(folder, demand) for demand in demands()]
    assert found[4][0] == found[5][0]
    return found


@pytest.mark.parametrize(("memory", "backend"), [*((memory, "cpu") for memory in MEMORIES), ("recompute", "reference")])
def test_tokens_and_logits_are_those_of_the_final_length(
    folder: Path, answers: list[tuple[list[int], Tensor]], memory: str, backend: str
) -> None:
    settings = {"max_num_seqs": 8, "attention_backend": backend, "block_size": 8, "max_model_len": 80}
    ours = record(folder, demands(), **settings | MEMORIES[memory])
    for seed, (choices, (tokens, logits)) in enumerate(zip(ours.tokens, answers, strict=True)):
        assert choices[0] == tokens
        np.testing.assert_allclose(logits_of(ours, seed, len(tokens)), logits.numpy(), atol=1e-4, rtol=1e-4)
    assert ours.stats.memory.prefix_hit_tokens > 0  # those that turn alike share what they have in common
    if memory in ("recompute", "swap"):
        assert ours.stats.scheduler.preemptions > 0


def test_the_length_makes_a_difference(folder: Path) -> None:
    """Else the comparison above would prove nothing."""
    text = torch.tensor(demands()[-1].prompt)[None]
    with torch.inference_mode():
        short, long = (told_its_length(folder, total)(text[:, :30]).logits for total in (ORIGINAL, 80))
    assert not torch.allclose(short, long, atol=1e-2)


def test_eviction_is_a_mask(folder: Path) -> None:
    settings = {"num_blocks": 20, "block_size": 8, "max_model_len": 80, "max_num_seqs": 8, "attention_backend": "cpu"}
    ours = record(folder, demands(), scattered(every=5), **settings)
    model = load_model(folder)
    for seed, (demand, [answer], [died_at]) in enumerate(zip(demands(), ours.tokens, ours.died_at, strict=True)):
        text = torch.tensor(demand.prompt + answer[:-1])
        total = len(demand.prompt) + len(answer)
        with torch.inference_mode():
            attend = dense_causal(model, len(text), died_at, total=total)
            dense = model.logits(model.hidden_states(text, torch.arange(len(text)), attend))[len(demand.prompt) - 1 :]
        np.testing.assert_allclose(logits_of(ours, seed, len(answer)), dense.numpy(), atol=1e-4, rtol=1e-4)
    assert any(died_at for [died_at] in ours.died_at)


def test_only_texts_that_turn_alike_share_blocks(folder: Path) -> None:
    prompt = demands()[-1].prompt[:33]

    def cached(llm: LLM, total: int, salt: str | None = None) -> int:
        params = SamplingParams(max_tokens=total - len(prompt), temperature=0.0)
        llm.engine.add_request("one", prompt, params, cache_salt=salt)
        while llm.engine.has_unfinished_requests():
            outputs = llm.engine.step()
        return outputs[-1].num_cached_tokens

    lengths = load_model(folder).spec.rope_lengths
    assert lengths is not None
    is_dynamic = lengths.longest is None
    with LLM(str(folder), num_blocks=60, block_size=8, max_model_len=80, skip_tokenizer_init=True) as llm:
        assert cached(llm, 35) == 0
        assert cached(llm, ORIGINAL) == 32
        assert cached(llm, ORIGINAL + 1) == 0
        assert cached(llm, ORIGINAL + 1) == 32
        assert cached(llm, 70) == (0 if is_dynamic else 32)
        assert cached(llm, 70, "tenant") == 0
        assert cached(llm, 36) == 32


def test_a_request_without_an_end_turns_by_what_it_may_come_to(folder: Path) -> None:
    """`max_tokens` is clamped to the room before the length is fixed, and `n` choices turn alike."""
    prompt = demands()[0].prompt
    with LLM(str(folder), num_blocks=60, block_size=8, max_model_len=52, skip_tokenizer_init=True) as llm:
        open_end = SamplingParams(max_tokens=None, temperature=0.0)
        clamped = SamplingParams(max_tokens=1000, temperature=0.0)
        exact = SamplingParams(max_tokens=52 - len(prompt), temperature=0.0)
        answers = [llm.generate([prompt], params)[0].outputs[0].token_ids for params in (open_end, clamped, exact)]
        assert answers[0] == answers[1] == answers[2]
        first = Demand(prompt, 0, {"max_tokens": 52 - len(prompt)})
        assert answers[0] == expected(folder, first)[0]
        several = llm.generate([prompt], SamplingParams(max_tokens=32, n=3, temperature=1.0, seed=5))[0].outputs
        lone = llm.generate([prompt], SamplingParams(max_tokens=32, temperature=1.0, seed=5))[0].outputs
        assert several[0].token_ids == lone[0].token_ids


def test_queries_to_come_turn_by_the_length_of_their_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that looks ahead, with texts of both kinds beside each other, up to the last position that they have."""
    asked: list[tuple[int, int, int]] = []

    def turns_from(self: ModelRunner, position: int, horizon: int, rope_length: int | None) -> tuple[Rotation, ...]:
        (turn,) = turns(self, position, horizon, rope_length)
        assert rope_length is not None
        positions = torch.arange(position, min(position + horizon, rope_length))
        (plain,) = self._model.rotations(positions, torch.full_like(positions, rope_length))
        assert torch.equal(turn.cos, plain.cos)
        asked.append((position, len(turn.cos), rope_length))
        return (turn,)

    turns = ModelRunner._turns_from
    monkeypatch.setattr(ModelRunner, "_turns_from", turns_from)
    settings = {"num_blocks": 60, "block_size": 8, "max_model_len": 80, "kv_policy": "expected_attention"}
    prompt = demands()[-1].prompt[:20]
    with LLM(str(folder), **settings, kv_budget=12, kv_trigger="always", skip_tokenizer_init=True) as llm:
        few, many = (SamplingParams(max_tokens=total - 20, temperature=0.0) for total in (ORIGINAL, 80))
        llm.generate([prompt, prompt], [few, many])
    assert len({rope_length for _, _, rope_length in asked}) == 2
    assert any(position + 512 > rope_length for position, _, rope_length in asked)
