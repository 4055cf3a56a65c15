"""Texts that must have too many tokens are refused without being tokenized, and no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from tests.tiny_tokenizers import CORPUS, byte_fallback, byte_level
from vtoken import RequestError
from vtoken.engine.text import Tokenizer
from vtoken.engine.token_bound import most_bytes_per_token

BACKENDS = {"byte-level": byte_level(), "byte fallback": byte_fallback()}
PIECES = [*CORPUS[:2], " " * 40, "<end>", "</s>", "好好", "▁", "a"]


@pytest.mark.parametrize("name", BACKENDS)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=20).map("".join))
def test_no_token_stands_for_more(name, text):
    bound = most_bytes_per_token(BACKENDS[name])
    assert len(text.encode()) <= bound * len(BACKENDS[name].encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_too_long_is_not_tokenized(name, monkeypatch):
    tokenizer = Tokenizer(BACKENDS[name])
    tokenizer.max_tokens = 100
    assert len(tokenizer.encode("x" * 150)) >= 1  # perhaps too long: whoever asks sees the tokens
    monkeypatch.setattr(tokenizer, "backend", None)
    with pytest.raises(RequestError, match=r"at least \d+ tokens, which is too much .* a sequence may have 100 tokens"):
        tokenizer.encode("x" * 10_000)


def test_nothing_is_said_where_text_may_vanish():
    stripping = byte_level()
    stripping.backend_tokenizer.normalizer = normalizers.Strip()
    swallowing = byte_level()
    swallowing.add_tokens([AddedToken("<mask>", lstrip=True)])
    dropping = byte_level()
    dropping.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unknown = byte_fallback()
    unknown.backend_tokenizer.normalizer = normalizers.Replace("xxxx", "")
    assert [most_bytes_per_token(each) for each in (stripping, swallowing, dropping, unknown)] == [None] * 4
    composed = byte_level()
    composed.backend_tokenizer.normalizer = normalizers.NFC()
    assert most_bytes_per_token(composed) == 4 * most_bytes_per_token(byte_level())
