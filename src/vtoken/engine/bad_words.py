"""The tokens of words that must not come up in an answer."""

from __future__ import annotations

from collections.abc import Iterable

from vtoken.base.errors import RequestError
from vtoken.base.validation import shorten
from vtoken.engine.text import Tokenizer


def tokens_of(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokenizer spells it at the start of a text and behind a space, as vLLM does.

    Other spellings of the same text, which a model rarely uses, stay possible. Raises RequestError for a text that has
    no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word  # a word of spaces is one
        for spelling in (bare, " " + bare):
            tokens = tuple(tokenizer.encode_plain(spelling))
            if not tokens:
                raise RequestError(f"bad_words: {shorten(word)} has no tokens in this vocabulary", "bad_words")
            found[tokens] = None
    return tuple(found)
