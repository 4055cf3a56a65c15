"""Tiny random checkpoints, written by transformers itself, for tests that need a real model.

The weights are drawn so that attention matters and no two parameters are alike: norms are not all ones, biases not
zero, scores spread. A wrong row, mask or scale then shows in the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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


def save_llama(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 112,
    max_position_embeddings: int = 512,
    tied: bool = False,
    rope: dict[str, Any] | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    eos_token_id: int | list[int] | None = None,
    bos_token_id: int | None = None,
    max_shard_size: str = "1GB",
    tokenizer: bool = False,
) -> Path:
    """Write a `LlamaForCausalLM` checkpoint to `folder` and return it.

    No stop id unless one is asked for, so that an answer's length is the test's choice. `max_shard_size="50KB"` makes
    several shards with an index; `tokenizer=True` adds the byte-level one (with `bos_token_id=BOS, eos_token_id=EOS` if
    the model is to know them).
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=dict(rope) if rope else None,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=tied,
        eos_token_id=eos_token_id,
        bos_token_id=bos_token_id,
    )
    return _save(LlamaForCausalLM(config), folder, seed, max_shard_size, tokenizer)


def save_mistral(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 112,
    max_position_embeddings: int = 512,
    sliding_window: int | None = 8,
    tied: bool = False,
    rope: dict[str, Any] | None = None,
    eos_token_id: int | list[int] | None = None,
    bos_token_id: int | None = None,
    max_shard_size: str = "1GB",
    tokenizer: bool = False,
) -> Path:
    """Write a `MistralForCausalLM` checkpoint to `folder` and return it; else as `save_llama`."""
    config = MistralConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        sliding_window=sliding_window,
        rope_parameters=dict(rope) if rope else None,
        tie_word_embeddings=tied,
        eos_token_id=eos_token_id,
        bos_token_id=bos_token_id,
    )
    return _save(MistralForCausalLM(config), folder, seed, max_shard_size, tokenizer)


def save_gpt2(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    num_layers: int = 3,
    num_heads: int = 4,
    intermediate_size: int | None = 112,
    max_position_embeddings: int = 512,
    tied: bool = True,
    eos_token_id: int | list[int] | None = None,
    bos_token_id: int | None = None,
    max_shard_size: str = "1GB",
    tokenizer: bool = False,
    **switches: Any,
) -> Path:
    """Write a `GPT2LMHeadModel` checkpoint to `folder` and return it; `switches` are keys of its config."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=hidden_size,
        n_inner=intermediate_size,
        n_layer=num_layers,
        n_head=num_heads,
        n_positions=max_position_embeddings,
        tie_word_embeddings=tied,
        eos_token_id=eos_token_id,
        bos_token_id=bos_token_id,
        **switches,
    )
    return _save(GPT2LMHeadModel(config), folder, seed, max_shard_size, tokenizer)


def save_opt(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 112,
    max_position_embeddings: int = 512,
    tied: bool = True,
    eos_token_id: int | list[int] | None = None,
    bos_token_id: int | None = None,
    max_shard_size: str = "1GB",
    tokenizer: bool = False,
    **switches: Any,
) -> Path:
    """Write an `OPTForCausalLM` checkpoint to `folder` and return it; `switches` are keys of its config."""
    config = OPTConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_dim=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        eos_token_id=eos_token_id,
        bos_token_id=bos_token_id,
        pad_token_id=None,
        **{"word_embed_proj_dim": hidden_size} | switches,
    )
    return _save(OPTForCausalLM(config), folder, seed, max_shard_size, tokenizer)


def save_gemma3(folder: Path, **changes: Any) -> Path:
    """Write a `Gemma3ForCausalLM` checkpoint to `folder` and return it; else as `save_gemma2`."""
    sizes, config = _gemma(changes)
    config = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} | config
    return _save(Gemma3ForCausalLM(Gemma3TextConfig(**config)), folder, **sizes)


def save_gemma2(folder: Path, **changes: Any) -> Path:
    """Write a `Gemma2ForCausalLM` checkpoint to `folder` and return it.

    `changes` are keys of its config, or `seed`, `max_shard_size` and `tokenizer` as for the others.
    """
    sizes, config = _gemma(changes)
    return _save(Gemma2ForCausalLM(Gemma2Config(**config)), folder, **sizes)


def _gemma(changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `_save` and of the config."""
    arguments = {"seed": 0, "max_shard_size": "1GB", "tokenizer": False}
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "max_position_embeddings": 512,
        "sliding_window": 9,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    chosen = {name: changes.pop(name, default) for name, default in arguments.items()}
    return chosen, config | changes


def save_qwen2(
    folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", tokenizer: bool = False, **config: Any
) -> Path:
    """Write a `Qwen2ForCausalLM` checkpoint to `folder` and return it. `config` has transformers' names and wins over
    sizes as `save_llama` has them. To a tokenizer beside this model transformers adds a token of its own."""
    config = ({"vocab_size": VOCAB_SIZE + 1} if tokenizer else {}) | config
    return _save(Qwen2ForCausalLM(Qwen2Config(**_SIZES | config)), folder, seed, max_shard_size, tokenizer)


def save_qwen3(
    folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", tokenizer: bool = False, **config: Any
) -> Path:
    """Write a `Qwen3ForCausalLM` checkpoint to `folder` and return it; else as `save_qwen2`."""
    model = Qwen3ForCausalLM(Qwen3Config(**_SIZES | {"head_dim": 24} | config))
    return _save(model, folder, seed, max_shard_size, tokenizer)


def save_phi3(
    folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", tokenizer: bool = False, **config: Any
) -> Path:
    """Write a `Phi3ForCausalLM` checkpoint to `folder` and return it; else as `save_qwen2`."""
    own = {"pad_token_id": None, "original_max_position_embeddings": config.get("max_position_embeddings", 512)}
    model = Phi3ForCausalLM(Phi3Config(**_SIZES | own | config))
    return _save(model, folder, seed, max_shard_size, tokenizer)


def save_any(folder: Path, family: str, *, seed: int = 0, tokenizer: bool = False, **config: Any) -> Path:
    """Write a checkpoint of `<family>ForCausalLM` or its like; `config` overrides sizes like those of the others."""
    made = getattr(transformers, f"{family}Config")(**_SIZES | {"pad_token_id": None} | config)
    kinds = (f"{family}{suffix}" for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    kind = next(kind for kind in kinds if hasattr(transformers, kind))
    return _save(getattr(transformers, kind)(made), folder, seed, "1GB", tokenizer)


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
}


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
