"""Writes tiny GGUF files, as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from tests.tiny_models import BOS, EOS, byte_characters

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_gguf(
    checkpoint: Path, path: Path, *, architecture: str = "llama", extra: Callable[[GGUFWriter], object] | None = None
) -> Path:
    """Write a checkpoint with the byte-level vocabulary as float32 GGUF; `extra` may add keys and tensors."""
    config = AutoConfig.from_pretrained(checkpoint)
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*byte_characters(), "<s>", "</s>", "ab"])
    writer.add_token_types([*[TokenType.NORMAL] * 256, TokenType.CONTROL, TokenType.CONTROL, TokenType.NORMAL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    if extra:
        extra(writer)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if architecture == "llama" and name.endswith("q_proj.weight"):
            tensor = _interleave(tensor, config.num_attention_heads)
        elif architecture == "llama" and name.endswith("k_proj.weight"):
            tensor = _interleave(tensor, config.num_key_value_heads)
        writer.add_tensor(_gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"
    tops = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return tops[name.removesuffix(".weight")] + ".weight"


def _interleave(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF turns neighbouring pairs where Hugging Face turns halves, so its rows of q and k are in another order."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return torch.transpose(halves, 1, 2).reshape(weight.shape).contiguous()
