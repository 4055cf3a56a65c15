"""Small real tokenizers of the two kinds that matter, built in a moment."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore.",
    "Žluťoučký kůň příšerně úpěl ďábelské ódy. 你好，世界。 🏳️‍🌈 👩‍🚀 e\u0301 नमस्ते",
] * 4
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}<|assistant|>"
)


def byte_level(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """As GPT-2, Llama-3 and SmolLM2 have it: every token is a run of bytes, which may cut characters anywhere."""
    tokenizer = Tokenizer(models.BPE())
    # No splitting into words first, so that merges run across characters as in Chinese text.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=CHAT_TEMPLATE)


def byte_level_of(chunks: list[bytes]) -> PreTrainedTokenizerFast:
    """A byte-level vocabulary in which token `i` is `chunks[i]`; it decodes only."""
    # GPT-2's table: printable bytes stand for themselves, the others for code points from 256 up.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    signs = {byte: chr(byte) for byte in printable}
    signs |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in signs)}
    vocab = {"".join(signs[byte] for byte in chunk): i for i, chunk in enumerate(chunks)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama-2 and Mistral have it: spaces are "▁", unknown characters are spelled in byte tokens."""
    words = ["▁", "▁the", "▁fox", "a", "e", "o", "s", "x", "▁▁", "好", "ž", "▁好", "."]
    specials = ["<unk>", "<s>", "</s>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    tokenizer.save_pretrained(str(folder))
    return folder
