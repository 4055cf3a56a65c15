"""Scores of tokens in the two shapes that OpenAI has for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from vtoken.engine.outputs import Logprob, TokenLogprobs
from vtoken.engine.text import IncrementalDetokenizer, Tokenizer
from vtoken.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from vtoken.server.protocol.common import PromptLogprobs, ScoredToken
from vtoken.server.protocol.completion import CompletionLogprobs

LOWEST = -9999.0  # in place of minus infinity and NaN, which JSON does not have; OpenAI uses it too


def finite(logprob: float) -> float:
    return LOWEST if math.isnan(logprob) else max(LOWEST, min(logprob, 0.0))


class TokenNames:
    """How tokens are called in scores: by their text; by `token_id:123` on demand, and without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, by_id: bool) -> None:
        self.tokenizer = tokenizer
        self._by_id = by_id

    def name(self, token: int) -> str:
        """As in chats: bytes that are no character show as replacement characters."""
        if self._by_id or self.tokenizer is None:
            return f"token_id:{token}"
        return self.tokenizer.token_text(token)

    def distinct_name(self, token: int) -> str:
        """As in completions, where names are keys: bytes that are no character are spelled `bytes:\\xf0\\x9f`."""
        data = self.bytes(token)
        if self._by_id or data is None:
            return self.name(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, token: int) -> bytes | None:
        return None if self.tokenizer is None else self.tokenizer.token_bytes(token)


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], scores: Iterable[TokenLogprobs], most: int
) -> ChatLogprobs:
    """`most`: how many of the likeliest tokens were asked for."""
    content = []
    for token, found in zip(token_ids, scores, strict=True):
        top = [_top(names, other, score) for other, score in _likeliest(found, most)]
        content.append(TokenLogprob(**_top(names, token, found[token]).model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


def _top(names: TokenNames, token: int, score: Logprob) -> TopLogprob:
    data = names.bytes(token)
    return TopLogprob(
        token=names.name(token), logprob=finite(score.logprob), bytes=None if data is None else list(data)
    )


def _likeliest(found: TokenLogprobs, most: int) -> list[tuple[int, Logprob]]:
    """Best first. The token itself is in `found` too, likely or not."""
    ranked = sorted(found.items(), key=lambda item: item[1].rank)
    return [(token, score) for token, score in ranked if score.rank <= most][:most]


class CompletionScores:
    """The scores of one choice, part by part: each part knows where in the choice's text its tokens are."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0
        self._detokenizer = None if names.tokenizer is None else IncrementalDetokenizer(names.tokenizer)

    def of(self, token_ids: Sequence[int], scores: Iterable[TokenLogprobs | None]) -> CompletionLogprobs:
        """Of the tokens that come next."""
        told = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, found in zip(token_ids, scores, strict=True):
            told.tokens.append(self._names.distinct_name(token))
            told.text_offset.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.push(token))
            told.token_logprobs.append(None if found is None else finite(found[token].logprob))
            told.top_logprobs.append(None if found is None else self._by_name(found))
        return told

    def _by_name(self, found: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, score in found.items():  # of two with the same name the likelier one counts
            name, value = self._names.distinct_name(token), finite(score.logprob)
            top[name] = max(value, top.get(name, value))
        return top


def prompt_logprobs(scores: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
    if scores is None:
        return None
    return [
        None if found is None else {str(token): _scored(score) for token, score in found.items()} for found in scores
    ]


def _scored(score: Logprob) -> ScoredToken:
    return ScoredToken(logprob=finite(score.logprob), rank=score.rank, decoded_token=score.decoded_token)
