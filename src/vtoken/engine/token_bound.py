"""How many bytes of text a token can stand for at most: so a text that is far too long is refused without being
tokenized, which takes minutes and gigabytes for some megabytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_KEEP_ALL = {"ByteLevel", "Split", "Digits", "Metaspace", "Sequence", "Prepend", "Replace", "NFC"}
_NFC_SHRINKS = 4  # times: three signs of three bytes may become one


def most_bytes_per_token(backend: Any) -> int | None:
    """For a transformers tokenizer; None where a token may stand for text of any length, or nothing is known.

    Every byte of a text must end up in some token, so nothing may be dropped before: no unknown words, no stripping.
    """
    tokenizer = getattr(backend, "backend_tokenizer", None)
    if tokenizer is None:
        return None
    parts = [json.loads(part.__getstate__()) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part]
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    steps = [step for part in parts for step in _steps(part)]
    has_every_byte = any(step.get("type") == "ByteLevel" for step in _steps(decoder)) or getattr(
        tokenizer.model, "byte_fallback", False
    )
    if not has_every_byte or not all(_keeps_all(step) for step in steps):
        return None
    if any(token.lstrip or token.rstrip for token in backend.added_tokens_decoder.values()):
        return None  # swallows all the blanks beside it
    # A sign of a byte-level vocabulary is a byte, one of any other has at least that many.
    longest = max((len(token.encode()) for token in backend.get_vocab()), default=1)
    return longest * (_NFC_SHRINKS if any(step.get("type") == "NFC" for step in steps) else 1)


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield part
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in part.get(name, ()):
            yield from _steps(inner)


def _keeps_all(step: dict[str, Any]) -> bool:
    if step.get("type") not in _KEEP_ALL or step.get("behavior") == "Removed":
        return False
    if step["type"] == "Replace":
        replaced = step.get("pattern", {}).get("String")
        return replaced is not None and len(step.get("content", "").encode()) >= len(replaced.encode())
    return True
