"""`kv_pin: "system"`: which tokens of a conversation are its system messages.

A template may put anything around a message, so places are told by rendering. Where the conversation up to a message,
and up to the one after it, render to beginnings of the whole, the message is what lies between. Some templates write
what the system says into the first message of the user, or refuse a conversation of the system alone; then, for system
messages that come first, it is all that comes before the place where conversations with other words of the user begin
to differ. What was found is decoded, and must hold what the messages say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vtoken.base.errors import RequestError
from vtoken.engine.text import Tokenizer

_SYSTEM = ("system", "developer")
_PROBES = ("a", "0")  # words that share no beginning, in any vocabulary


def find_system(
    tokenizer: Tokenizer, messages: Sequence[Any], rendering: Mapping[str, Any]
) -> tuple[tuple[int, int], ...]:
    """Ranges [start, end) of tokens. `rendering`: arguments of `Tokenizer.encode_chat`.

    Raises RequestError if there is no system message, or if it cannot be told where it is.
    """
    whole = tokenizer.encode_chat(messages, **rendering)
    places = [i for i, message in enumerate(messages) if message.get("role") in _SYSTEM]
    if not places:
        raise RequestError("kv_pin: 'system' pins the system messages, and there is none", "kv_pin")
    found = _by_growing(tokenizer, messages, rendering, whole, places)
    if found is None and places == list(range(len(places))):
        found = _by_differing(tokenizer, messages, rendering, whole, len(places))
    if found is None or not _holds(tokenizer, whole, found, [messages[i] for i in places]):
        raise RequestError(
            "kv_pin: with this chat template it cannot be told where the system messages are; give ranges of "
            "positions, such as [[0, 24]]",
            "kv_pin",
        )
    return tuple(found)


def _by_growing(
    tokenizer: Tokenizer, messages: Sequence[Any], rendering: Mapping[str, Any], whole: list[int], places: list[int]
) -> list[tuple[int, int]] | None:
    as_it_is = {**rendering, "add_generation_prompt": False, "continue_final_message": False}

    def length(num_messages: int) -> int | None:
        if num_messages == 0:
            return 0
        try:
            begun = tokenizer.encode_chat(messages[:num_messages], **as_it_is)
        except RequestError:
            return None
        return len(begun) if whole[: len(begun)] == begun else None

    found: list[tuple[int, int]] = []
    for place in places:
        start, end = length(place), length(place + 1)
        if start is None or end is None or start >= end:
            return None
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found


def _by_differing(
    tokenizer: Tokenizer, messages: Sequence[Any], rendering: Mapping[str, Any], whole: list[int], count: int
) -> list[tuple[int, int]] | None:
    end = len(whole)
    for word in _PROBES:
        try:
            other = tokenizer.encode_chat([*messages[:count], {"role": "user", "content": word}], **rendering)
        except RequestError:
            return None
        same = next(
            (i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b), min(len(whole), len(other))
        )
        end = min(end, same)
    return [(0, end)] if end else None


def _holds(tokenizer: Tokenizer, whole: list[int], ranges: list[tuple[int, int]], messages: Sequence[Any]) -> bool:
    text = "".join(tokenizer.decode_raw(whole[start:end]) for start, end in ranges)
    return all(words.strip() in text for message in messages for words in _words(message.get("content")))


def _words(content: Any) -> list[str]:
    """`encode_chat` has checked what content may be."""
    if isinstance(content, list):
        return [part if isinstance(part, str) else part["text"] for part in content]
    return [content or ""]
