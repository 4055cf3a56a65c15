"""Prompts in every form that users write them, and the token ids that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from vtoken.base.errors import RequestError
from vtoken.base.validation import shorten
from vtoken.engine.text import Tokenizer, prompt_of_nothing

Prompt = str | SequenceOf[int]
AnyPrompt = Prompt | Mapping[str, Any]
"""A prompt, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, which may have a `"cache_salt"`."""
Prompts = AnyPrompt | SequenceOf[AnyPrompt]


def list_prompts(prompts: Prompts) -> list[Any]:
    """One prompt or many: a flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_row = isinstance(prompts, np.ndarray) and prompts.ndim > 0
    if not is_row and (isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, SequenceOf)):
        raise RequestError(
            f"prompt: expected text, token ids or a list of them, got {type(prompts).__name__}", "prompt"
        )
    if len(prompts) and isinstance(prompts[0], int | np.integer) and not isinstance(prompts[0], bool):
        return [prompts]
    return list(prompts)


def parse_prompt(prompt: Any) -> tuple[Prompt, str | None]:
    """(text or token ids, cache salt)"""
    if not isinstance(prompt, Mapping):
        return prompt, None
    known = {"prompt", "prompt_token_ids", "cache_salt"}
    kinds = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(kinds) != 1 or set(prompt) - known:
        raise RequestError(
            "prompt: a mapping has either 'prompt' or 'prompt_token_ids', and may have a 'cache_salt'; got "
            f"{sorted(map(str, prompt))} (for chat messages: llm.chat)",
            "prompt",
        )
    return prompt[kinds[0]], prompt.get("cache_salt")


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, *, vocab_size: int, bos_token_id: int | None
) -> list[int]:
    """The token ids of a prompt, each of them in the vocabulary, whoever made them. Raises RequestError."""
    token_ids = _tokenize(prompt, tokenizer, bos_token_id)
    # Plain numbers are looked at by C: a prompt may have millions. Anything else is looked at one by one.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return token_ids
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise RequestError(f"prompt: expected whole numbers as token ids, got {shorten(token)}", "prompt")
        if not 0 <= token < vocab_size:
            message = f"prompt: token ids go from 0 to {vocab_size - 1} (the vocabulary), got {shorten(token)}"
            raise RequestError(message, "prompt")
    return [int(token) for token in token_ids]


def _tokenize(prompt: Prompt, tokenizer: Tokenizer | None, bos_token_id: int | None) -> list[Any]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "prompt: this engine has no tokenizer (skip_tokenizer_init=True); send token ids", "prompt"
            )
        return tokenizer.encode(prompt)
    is_row = isinstance(prompt, np.ndarray) and prompt.ndim == 1
    if not is_row and (isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, SequenceOf)):
        raise RequestError(f"prompt: expected text or token ids, got {shorten(prompt)}", "prompt")
    return list(prompt) if len(prompt) else prompt_of_nothing(bos_token_id)
