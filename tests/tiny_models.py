"""Tiny random checkpoints, written by transformers itself, for tests that need a real model.

The weights are drawn so that attention matters and no two parameters are alike: norms are not all ones, biases not
zero, scores spread. A wrong row, mask or scale then shows in the logits.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

BOS = 256
EOS = 257
VOCAB_SIZE = 258  # the 256 bytes (token id = byte), then BOS and EOS

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}


def long_rope(num_frequencies: int, original: int = 64) -> dict[str, Any]:
    """Factors of which no two are alike."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(num_frequencies)],
        "long_factor": [1.5 + 0.9 * i for i in range(num_frequencies)],
        "original_max_position_embeddings": original,
    }


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    # No stop id unless one is asked for, so that an answer's length is the test's choice.
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LLAMA: dict[str, Any] = {"intermediate_size": 112, "num_key_value_heads": 2}
_GEMMA = _LLAMA | {"num_hidden_layers": 3, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 9}

# What a family has beside `_SIZES`, or instead; those that are not here are like Llama.
_FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": _LLAMA | {"sliding_window": 8},
    "GPT2": {"n_inner": 112, "num_hidden_layers": 3},
    "OPT": {"ffn_dim": 112, "word_embed_proj_dim": None},  # None: as wide as the model
    "Gemma2": _GEMMA,
    "Gemma3": _GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "Qwen3": _LLAMA | {"head_dim": 24},
}
_SHORT_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "tied": "tie_word_embeddings",
    "rope": "rope_parameters",
}


def save_any(
    folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", tokenizer: bool = False, **config: Any
) -> Path:
    """Write a checkpoint of `<family>ForCausalLM` or its like to `folder` and return it.

    `config` has transformers' names, or our short ones. `max_shard_size="50KB"` makes several shards with an index;
    `tokenizer=True` adds the byte-level one (with `bos_token_id=BOS, eos_token_id=EOS` if the model is to know them).
    """
    kinds = (f"{family}{suffix}" for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    model = getattr(transformers, next(kind for kind in kinds if hasattr(transformers, kind)))
    chosen = {_SHORT_NAMES.get(name, name): value for name, value in config.items()}
    made = model.config_class(**_SIZES | _FAMILIES.get(family, _LLAMA) | chosen)
    return _save(model(made), folder, seed, max_shard_size, tokenizer)


save_llama = partial(save_any, family="Llama")
save_mistral = partial(save_any, family="Mistral")
save_gpt2 = partial(save_any, family="GPT2")
save_opt = partial(save_any, family="OPT")
save_gemma2 = partial(save_any, family="Gemma2")
save_gemma3 = partial(save_any, family="Gemma3")
save_qwen3 = partial(save_any, family="Qwen3")


def save_qwen2(folder: Path, *, tokenizer: bool = False, **config: Any) -> Path:
    """As `save_any`. To a tokenizer beside this model transformers adds a token of its own."""
    room = {"vocab_size": VOCAB_SIZE + 1} if tokenizer else {}
    return save_any(folder, "Qwen2", tokenizer=tokenizer, **room | config)


def save_phi3(folder: Path, **config: Any) -> Path:
    """As `save_any`; the rotation is that of the whole length unless a test says otherwise."""
    length = config.get("max_position_embeddings", _SIZES["max_position_embeddings"])
    return save_any(folder, "Phi3", **{"original_max_position_embeddings": length} | config)


def save_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer: any text, one token a byte; `BOS` and `EOS` are known but not added."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    substitutes = map(chr, range(256, 512))
    return [chr(byte) if byte in printable else next(substitutes) for byte in range(256)]


def _save(model: PreTrainedModel, folder: Path, seed: int, max_shard_size: str, tokenizer: bool) -> Path:
    generator = torch.Generator().manual_seed(seed)
    around_one = 0 if model.config.model_type.startswith("gemma") else 1  # Gemma's norms multiply by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(around_one + 0.2 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
    # transformers would write stop ids of its own into an empty one.
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, bos_token_id=model.config.bos_token_id
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        save_tokenizer(folder)
    return folder


HEAVY = list(range(1, 9))
"""Tokens that draw attention wherever they stand, in models of `save_planted_llama`."""


def save_planted_llama(folder: Path, *, seed: int = 0) -> Path:
    """A Llama in which the tokens `HEAVY` draw attention: their embedding has a direction of its own, which keys turn
    into a component of the slowest rotation, to which all queries are drawn."""
    save_llama(folder, seed=seed, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    model = LlamaForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    common, heavy = torch.linalg.qr(torch.randn(64, 2, generator=generator))[0].T
    slow = 7  # of 8 pairs of dimensions the last turns least
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding += 2 * embedding.norm(dim=1).mean() * common
        embedding[HEAVY] += 3 * embedding.norm(dim=1).mean() * heavy
        for layer in model.model.layers:
            keys, queries = layer.self_attn.k_proj.weight, layer.self_attn.q_proj.weight
            scale = queries.norm(dim=1).mean()
            for head in range(2):
                keys[16 * head + slow] = 2 * scale * heavy
            for head in range(4):
                queries[16 * head + slow] = 2 * scale * common
    model.save_pretrained(folder)
    return folder
