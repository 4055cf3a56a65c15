from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny_tokenizers
from vtoken import CheckpointError, RequestError
from vtoken.engine.text import IncrementalDetokenizer, Tokenizer

BYTE_LEVEL = Tokenizer(tiny_tokenizers.byte_level())
BYTE_FALLBACK = Tokenizer(tiny_tokenizers.byte_fallback())
KINDS = [pytest.param(BYTE_LEVEL, id="byte-level"), pytest.param(BYTE_FALLBACK, id="byte-fallback")]
REPLACEMENT = "\ufffd"
TEXTS = [
    "🏳️‍🌈 Žď 你好",
    "नमस्ते e\u0301e\u0301",
    "the fox",
    " the  fox ",
    "x",
    "\n\n",
    "👩‍🚀👩‍🚀👩‍🚀",
    "a\ufffdb",
    "好好 好",
]


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


def hugging_face(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.backend.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("tokenizer", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_breaks_a_character(tokenizer: Tokenizer, text: str) -> None:  # U09, U86
    token_ids = tokenizer.encode(text)
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == hugging_face(tokenizer, token_ids)
    assert "".join(pieces).count(REPLACEMENT) == text.count(REPLACEMENT)


@pytest.mark.parametrize("tokenizer", KINDS)
@given(data=st.data())
def test_any_text_streams_to_itself(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = tokenizer.encode(data.draw(st.text(min_size=1)))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids) == hugging_face(tokenizer, token_ids)


@pytest.mark.parametrize("tokenizer", KINDS)
@given(data=st.data())
def test_any_ids_stream_to_their_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Ids beyond the vocabulary, special ones and bytes that are no text are among them.
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer.backend) + 20)))
    joined = "".join(stream(tokenizer, token_ids))
    assert joined == tokenizer.decode(token_ids)
    if tokenizer is BYTE_LEVEL or REPLACEMENT not in hugging_face(tokenizer, token_ids):
        assert joined == hugging_face(tokenizer, token_ids)


@given(st.lists(st.sampled_from([b"\xe4", b"\xbd", b"\xa0", b"\xf0", b"\x9f", b"\xff", b"a", b" "]), max_size=30))
def test_byte_tokens_read_as_utf8(run: list[bytes]) -> None:
    token_ids = [BYTE_FALLBACK.backend.convert_tokens_to_ids(f"<0x{byte[0]:02X}>") for byte in run]
    expected = b"".join(run).decode(errors="replace")
    # The decoder of such tokenizers drops one leading space.
    assert "".join(stream(BYTE_FALLBACK, token_ids)) == expected.removeprefix(" ")


@pytest.mark.parametrize("tokenizer", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_by_the_length_is_one_replacement_at_the_end(tokenizer: Tokenizer, cut: int) -> None:
    # None of the vocabularies has the character as a whole, so its 4 bytes are 4 tokens.
    token_ids = tokenizer.encode("the 𒀀")[:-cut]
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == f"the {REPLACEMENT}"
    assert pieces[-1].endswith(REPLACEMENT)


def test_characters_that_straddle_every_token_are_not_held_back_for_long() -> None:
    # Characters and tokens of 4 bytes, half a character apart: every token but the last ends inside a character.
    text = "𒀀𒀁" * 300
    raw = text.encode()
    chunks = [raw[max(0, i) : i + 4] for i in range(-2, len(raw), 4)]
    vocabulary = list(dict.fromkeys(chunks))
    tokenizer = Tokenizer(tiny_tokenizers.byte_level_of(vocabulary))
    token_ids = [vocabulary.index(chunk) for chunk in chunks]
    shown = ""
    detokenizer = IncrementalDetokenizer(tokenizer)
    for done, token_id in enumerate(token_ids, start=1):
        shown += detokenizer.push(token_id)
        assert text.startswith(shown)
        assert 4 * done - len(shown.encode()) <= 16
    assert shown + detokenizer.finish() == text


@pytest.mark.parametrize("tokenizer", KINDS)
def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    decode_raw = Tokenizer.decode_raw

    def counting(self: Tokenizer, token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode_raw(self, token_ids)

    monkeypatch.setattr(Tokenizer, "decode_raw", counting)
    bad = tokenizer.encode("𒀀", add_special_tokens=False)[-1]
    for token_ids in (tokenizer.encode("the fox 你好 " * 50), [bad] * 200):
        stream(tokenizer, token_ids)
    assert longest <= 8


def test_special_and_padded_tokens_have_no_text() -> None:  # U67
    token_ids = BYTE_FALLBACK.encode("the fox")
    noisy = [1, token_ids[0], 2, 10**6, *token_ids[1:], len(BYTE_FALLBACK.backend) + 3]
    assert BYTE_FALLBACK.decode(noisy) == "".join(stream(BYTE_FALLBACK, noisy)) == "the fox"


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:  # U67
    size = len(BYTE_LEVEL.backend)
    Tokenizer(BYTE_LEVEL.backend, vocab_size=size + 64)
    Tokenizer(BYTE_LEVEL.backend, vocab_size=size)
    with pytest.raises(CheckpointError, match=f"token ids up to {size - 1}, but .* ends at {size - 2}"):
        Tokenizer(BYTE_LEVEL.backend, vocab_size=size - 1)


def test_an_empty_prompt_is_the_bos_token_or_refused() -> None:  # U39
    assert BYTE_FALLBACK.encode("") == [1]
    with pytest.raises(RequestError, match="no BOS token") as caught:
        BYTE_LEVEL.encode("")
    assert caught.value.field == "prompt"


def test_half_a_surrogate_pair_is_refused() -> None:  # U83
    with pytest.raises(RequestError, match="character 2 is half a surrogate pair") as caught:
        BYTE_LEVEL.encode("ab\ud800")
    assert caught.value.field == "prompt"


def test_chat_uses_the_models_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    token_ids = BYTE_LEVEL.encode_chat(messages)
    assert BYTE_LEVEL.backend.decode(token_ids) == "<|system|>Be brief.<end><|user|>Hi<end><|assistant|>"


def test_chat_refusals_say_why() -> None:  # U74
    with pytest.raises(RequestError, match="no chat template"):
        BYTE_FALLBACK.encode_chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(RequestError, match="unknown role .foo"):
        BYTE_LEVEL.encode_chat([{"role": "foo", "content": "Hi"}])


def test_a_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizers.save(BYTE_LEVEL.backend, tmp_path)
    loaded = Tokenizer.from_folder(tmp_path, vocab_size=len(BYTE_LEVEL.backend))
    assert loaded.encode("the fox") == BYTE_LEVEL.encode("the fox")


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:  # U91
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer in .*tokenizer=.*skip_tokenizer_init=True"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
