"""The whole engine against `transformers` in float32: logits to 1e-4, greedy tokens equal, whatever the memory does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.recorded import Demand, Recording, record, scattered
from tests.models.dense import dense_causal
from tests.tiny_models import (
    LLAMA3_ROPE,
    VOCAB_SIZE,
    YARN_ROPE,
    save_any,
    save_gemma2,
    save_gemma3,
    save_gpt2,
    save_llama,
    save_mistral,
    save_opt,
    save_phi3,
    save_qwen2,
    save_qwen3,
)
from vtoken.models.loader import load_model

NEW_TOKENS = 24

FAMILIES = {
    "grouped heads": lambda folder: save_llama(folder),
    "one kv head, tied": lambda folder: save_llama(folder, num_kv_heads=1, tied=True, seed=1),
    "wide heads, biases": lambda folder: save_llama(folder, head_dim=32, attention_bias=True, mlp_bias=True, seed=2),
    "llama3 rope, shards": lambda folder: save_llama(folder, rope=LLAMA3_ROPE, max_shard_size="50KB", seed=3),
    "mistral with a window": lambda folder: save_mistral(folder, sliding_window=9),
    "gpt2": lambda folder: save_gpt2(folder, scale_attn_by_inverse_layer_idx=True),
    "opt, norms first": lambda folder: save_opt(folder),
    "opt, norms last, narrow embeddings": lambda folder: save_opt(
        folder, do_layer_norm_before=False, word_embed_proj_dim=48
    ),
    "gemma2": lambda folder: save_gemma2(folder, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": lambda folder: save_gemma3(folder, final_logit_softcapping=3.0),
    "qwen2, window of one layer": lambda folder: save_qwen2(
        folder, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3, yarn": lambda folder: save_qwen3(folder, rope_parameters=YARN_ROPE, tie_word_embeddings=True),
    "phi3, part of a head": lambda folder: save_phi3(
        folder, sliding_window=9, rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    ),
    "mixtral with a window": lambda folder: save_any(folder, "Mixtral", num_local_experts=5, sliding_window=9),
    "stablelm, by transformers' code": lambda folder: save_any(folder, "StableLm"),
    "cohere2, by transformers' code": lambda folder: save_any(folder, "Cohere2", num_hidden_layers=4, sliding_window=9),
}

MEMORIES = {
    "roomy": {"num_blocks": 100},
    "alone": {"num_blocks": 100, "max_num_seqs": 1, "max_num_batched_tokens": 1000},
    "small chunks": {"num_blocks": 100, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    "recompute": {"num_blocks": 12, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    "swap": {"num_blocks": 12, "preemption": "swap", "swap_space": "1MiB"},
    "blocks of 7": {"num_blocks": 30, "block_size": 7, "preemption": "swap", "swap_space": "20KiB"},
    "blocks of 4, nothing cached": {"num_blocks": 48, "block_size": 4, "enable_prefix_caching": False},
}


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    shared = random.integers(0, VOCAB_SIZE, 40).tolist()
    return [[*shared[:33], i, *random.integers(0, VOCAB_SIZE, 3 * i).tolist()] for i in range(5)] + [[1], shared]


# Memory knows nothing of families, but for windows and whose code runs: a few families go through all of it, the others
# through chunks that find a prefix cached and through preemption.
EVERYWHERE = ("grouped heads", "mistral with a window", "cohere2, by transformers' code")
FOR_ALL = ("small chunks", "swap")
CASES = [
    pytest.param(
        family,
        memory,
        marks=() if family in EVERYWHERE or memory in FOR_ALL else pytest.mark.slow,
    )
    for family in FAMILIES
    for memory in MEMORIES
]


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    folder = FAMILIES[request.param](tmp_path_factory.mktemp("model"))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers, logits = [], []
    for prompt in _prompts():
        with torch.inference_mode():
            whole = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),  # without it, generate takes token 0 for padding
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )[0]
            logits.append(theirs(whole[None, :-1]).logits[0, len(prompt) - 1 :].numpy())
        answers.append(whole[len(prompt) :].tolist())
    return folder, answers, logits


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("family", "memory"), CASES, indirect=["family"], scope="module")
def test_tokens_and_logits_are_those_of_transformers(family, memory, backend):
    folder, answers, logits = family
    demands = [Demand(prompt, i, {"max_tokens": NEW_TOKENS, "temperature": 0.0}) for i, prompt in enumerate(_prompts())]
    settings = {"max_num_seqs": 8, "attention_backend": backend} | MEMORIES[memory]
    ours = record(folder, demands, max_model_len=84, **settings)
    assert [choices[0] for choices in ours.tokens] == answers
    for seed, theirs in enumerate(logits):
        np.testing.assert_allclose(_logits(ours, seed), theirs, atol=1e-4, rtol=1e-4)
    if memory == "recompute":
        assert ours.stats.scheduler.preemptions_recompute > 0
    if memory == "swap":
        assert ours.stats.scheduler.preemptions_swap > 0
    if memory == "small chunks":
        assert ours.stats.memory.prefix_hit_tokens > 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="module")
def test_eviction_is_a_mask(family, backend):
    """The oracle of eviction: dense attention over the whole text, in which a dead token is hidden from the queries at
    and after the length at which it died."""
    folder, _, _ = family
    demands = [Demand(prompt, i, {"max_tokens": NEW_TOKENS, "temperature": 0.0}) for i, prompt in enumerate(_prompts())]
    settings = {"num_blocks": 16, "block_size": 8, "max_model_len": 84, "max_num_seqs": 8, "attention_backend": backend}
    ours = record(folder, demands, scattered(every=5), **settings)
    model = load_model(folder, "float32")
    assert ours.stats.scheduler.preemptions > 0
    for seed, (prompt, [answer], [died_at]) in enumerate(zip(_prompts(), ours.tokens, ours.died_at, strict=True)):
        assert died_at
        text = torch.tensor(prompt + answer[:-1])
        dense = _masked_logits(model, text, died_at)[len(prompt) - 1 :]
        np.testing.assert_allclose(_logits(ours, seed), dense.numpy(), atol=1e-4, rtol=1e-4)


def _logits(recording: Recording, seed: int) -> np.ndarray:
    """[tokens generated, vocabulary]"""
    rows = [recording.bits[seed, 0, index] for index in range(NEW_TOKENS)]
    return np.stack([np.frombuffer(row, np.float32) for row in rows])


def _masked_logits(model, text: torch.Tensor, died_at: dict[int, int]) -> torch.Tensor:
    with torch.inference_mode():
        attend = dense_causal(model, len(text), died_at)
        return model.logits(model.hidden_states(text, torch.arange(len(text)), attend))
