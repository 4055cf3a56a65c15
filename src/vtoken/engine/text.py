"""Text to token ids and back. transformers is imported when the first tokenizer is loaded, not before."""

from __future__ import annotations

import codecs
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vtoken.base.errors import CheckpointError, RequestError
from vtoken.base.validation import shorten
from vtoken.engine.chat import Message, check_messages, check_tools
from vtoken.engine.token_bound import most_bytes_per_token

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put for bytes that are no character
# A character has at most 4 bytes and a token at least one, so only the last 3 tokens can hold the start of a cut one.
_MAX_CUT_TOKENS = 3
_LONGEST_REASON = 300  # characters of what a template says when it refuses


def _bytes_of_signs() -> dict[str, int]:
    """GPT-2's table: printable bytes are written as themselves, the others as the characters from U+0100 up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES_OF_SIGNS = _bytes_of_signs()


def _shortest_decode(backend: Any) -> Callable[[list[int]], str]:
    """`backend.decode`; where that is the library's own, straight to what it calls, in a third of the time."""
    from transformers import PreTrainedTokenizerFast

    kind = type(backend)
    is_usual = isinstance(backend, PreTrainedTokenizerFast) and (
        kind.decode is PreTrainedTokenizerFast.decode and kind._decode is PreTrainedTokenizerFast._decode
    )
    if is_usual:
        return partial(backend.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(backend.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Tokenizer:
    """A Hugging Face tokenizer, kept to what an engine needs.

    Special tokens, and ids that the model has but the tokenizer has not (padded vocabularies), have no text.
    """

    def __init__(self, backend: Any, vocab_size: int | None = None) -> None:
        """`backend` is a transformers tokenizer, `vocab_size` the number of rows of the model's embedding.

        Raises CheckpointError if the tokenizer knows ids that the model does not.
        """
        vocabulary: dict[str, int] = backend.get_vocab()
        largest = max(vocabulary.values(), default=-1)
        if vocab_size is not None and largest >= vocab_size:
            raise CheckpointError(
                f"the tokenizer has token ids up to {largest}, but the model's vocabulary ends at {vocab_size - 1}; "
                "give the tokenizer that belongs to this model with tokenizer=..."
            )
        self.backend = backend
        self.bos_token_id: int | None = backend.bos_token_id
        self.eos_token_id: int | None = backend.eos_token_id
        special = {token_id for token_id, token in backend.added_tokens_decoder.items() if token.special}
        self._audible = frozenset(vocabulary.values()) - special - set(backend.all_special_ids)
        # Sentencepiece vocabularies spell characters they lack as one token for each byte, "<0xE4>".
        byte_tokens = {vocabulary.get(f"<0x{byte:02X}>", -1): bytes([byte]) for byte in range(256)}
        self._byte_tokens = byte_tokens if -1 not in byte_tokens else {}
        self.max_tokens: int | None = None
        """Texts that must have more are refused before they are tokenized; set by whoever has a limit."""
        self._most_bytes_per_token = most_bytes_per_token(backend)
        self.letter_token = vocabulary.get("<0x41>", -1)
        self._known = frozenset(vocabulary.values())
        self._token_texts: dict[int, str] = {}  # what `token_text` has been asked for
        self._lengths_alone: dict[int, int] = {}  # what `length_alone` has been asked for
        self._decode = _shortest_decode(backend)
        self._anchor_token = next((vocabulary[letter] for letter in "aAeE01" if letter in vocabulary), None)
        # The first call takes off the truncation and padding that a tokenizer file may ask for; later ones change
        # nothing in the tokenizer, so several threads may make them at once.
        backend.encode("", add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.backend.chat_template)

    @classmethod
    def from_folder(cls, folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder; the network is never asked.

        Raises CheckpointError if there is none, if it cannot be read, or if it does not belong to the model.
        """
        try:
            folder = Path(folder).expanduser()
            is_there = any((folder / name).is_file() for name in _TOKENIZER_FILES)
        except (OSError, RuntimeError) as error:  # too long, not allowed; or "~nobody"
            raise CheckpointError(
                f"the tokenizer folder {shorten(str(folder))} cannot be looked up: {error}"
            ) from error
        if not is_there:
            raise CheckpointError(
                f"no tokenizer in {folder}: expected one of {', '.join(_TOKENIZER_FILES)}; give a folder that has one "
                "with tokenizer=..., or set skip_tokenizer_init=True and send token ids"
            )
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # a damaged file surfaces as almost any type
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"the tokenizer in {folder} cannot be read: {reason}") from error
        return cls(backend, vocab_size)

    def encode(self, prompt: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts around one (a BOS token, where the model was trained so).

        An empty prompt becomes the BOS token. Raises RequestError, about `field`, if there is none, and for what is
        no Unicode.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{field}: character {error.start} is half a surrogate pair, not text", field) from None
        self._check_length(prompt, field)
        token_ids: list[int] = self.backend.encode(prompt, add_special_tokens=add_special_tokens)
        return token_ids or prompt_of_nothing(self.bos_token_id)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` alone, which must be Unicode: nothing is put around it, nothing stands for nothing."""
        token_ids: list[int] = self.backend.encode(text, add_special_tokens=False)
        return token_ids

    def _check_length(self, text: str, field: str) -> None:
        """Raise RequestError for a text that is too long in any spelling: nobody is to wait until that is tokenized."""
        if self.max_tokens is None or self._most_bytes_per_token is None:
            return
        least = len(text) // self._most_bytes_per_token
        if least > self.max_tokens:
            raise RequestError(
                f"{field}: {len(text)} characters are at least {least} tokens, which is too much to be tokenized here: "
                f"a sequence may have {self.max_tokens} tokens (max_model_len)",
                field,
            )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's own format.

        Args:
            messages: `{"role": ..., "content": ...}`, content being text, a list of text parts, or None.
            tools: descriptions of functions, for templates that tell the model of them.
            chat_template: a Jinja template instead of the model's own.
            add_generation_prompt: end where the assistant is to answer.
            continue_final_message: end inside the last message, for the model to go on with it; not both.
            chat_template_kwargs: more that the template asks for, such as `{"enable_thinking": False}`.

        Raises RequestError for messages that are none, if there is no template, and if the template refuses them.
        """
        template = self.backend.chat_template if chat_template is None else chat_template
        if not template:
            raise RequestError(
                "messages: this model has no chat template; give one with chat_template=..., add a "
                "chat_template.jinja to its folder, or send a plain prompt",
                "messages",
            )
        if chat_template is not None and not isinstance(chat_template, str):
            message = f"chat_template: expected a Jinja template as text, got {shorten(chat_template)}"
            raise RequestError(message, "chat_template")
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message: the last message is gone on with, so no answer may be begun; set "
                "add_generation_prompt=False",
                "continue_final_message",
            )
        checked = check_messages(messages, knows_developer="developer" in str(template))
        listed = check_tools(tools)
        extra = self._template_arguments(chat_template_kwargs)
        try:
            text: str = self.backend.apply_chat_template(
                checked,
                tools=listed,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **extra,
            )
        except Exception as error:  # templates raise what they like
            reason = str(error).strip().partition("\n")[0][:_LONGEST_REASON] or type(error).__name__
            raise RequestError(f"messages: the chat template refused them: {reason}", "messages") from error
        # The template has written the special tokens already.
        return self.encode(text, add_special_tokens=False, field="messages")

    def _template_arguments(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a user hands to the template, and to nothing else."""
        field = "chat_template_kwargs"
        if given is None:
            return {}
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise RequestError(f"{field}: expected names and values, got {shorten(given)}", field)
        ours = {"self", "messages", *inspect.signature(self.backend.apply_chat_template).parameters}
        taken = sorted(ours & given.keys())
        if taken:
            raise RequestError(f"{field}: {', '.join(taken)} cannot be set here", field)
        return dict(given)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`: exactly what `IncrementalDetokenizer` gives for them, piece by piece."""
        text = self.decode_raw([token_id for token_id in token_ids if token_id in self._audible])
        if _REPLACEMENT not in text:
            return text
        # Some decoders give up a whole run of byte tokens for one bad byte; a stream has shown its good part by then.
        detokenizer = IncrementalDetokenizer(self)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()

    def decode_raw(self, token_ids: list[int]) -> str:
        """What the tokenizer itself makes of `token_ids`."""
        return self._decode(token_ids)

    def length_alone(self, token_id: int) -> int:
        """Characters of the text of one token and nothing else."""
        length = self._lengths_alone.get(token_id)
        if length is None:
            length = self._lengths_alone[token_id] = len(self.decode_raw([token_id]))
        return length

    def token_text(self, token_id: int) -> str:
        """What a token says by itself, special ones too; "" for one that the tokenizer does not know.

        Bytes that are no character are replacement characters.
        """
        if token_id not in self._token_texts:
            anchor = self._anchor_token  # decoders may drop the space that a text begins with
            known = [anchor] if anchor is not None else []
            whole = self.decode_raw([*known, token_id]) if token_id in self._known else ""
            self._token_texts[token_id] = whole[len(self.decode_raw(known)) :] if whole and known else whole
        return self._token_texts[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; only those of several in a row need be whole characters."""
        byte = self._byte_tokens.get(token_id)
        text = self.token_text(token_id)
        if byte is not None or _REPLACEMENT not in text:
            return text.encode() if byte is None else byte
        # Byte-level vocabularies write each byte as a character of its own.
        signs: str = self.backend.convert_ids_to_tokens(token_id)
        if all(sign in _BYTES_OF_SIGNS for sign in signs):
            return bytes(map(_BYTES_OF_SIGNS.__getitem__, signs))
        return text.encode()

    def is_known(self, token_id: int) -> bool:
        """Whether the tokenizer has such a token; the model may have more."""
        return token_id in self._known

    def is_audible(self, token_id: int) -> bool:
        """Whether a token has text: it exists and is not special."""
        return token_id in self._audible

    def byte_of(self, token_id: int) -> bytes | None:
        """The byte that a byte token stands for, None for any other token."""
        return self._byte_tokens.get(token_id)


class IncrementalDetokenizer:
    """Text of one growing answer, in pieces that never break a character and together are its `Tokenizer.decode`.

    A decoder may treat the start of a text specially (a leading space goes) and merges the bytes of neighbouring
    tokens, so a token is decoded behind an *anchor*, tokens whose text is out already, and what the anchor alone gives
    is cut off. Both stay a few tokens long: the cost of a token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = []
        self._pending: list[int] = []  # tokens whose last character is not whole yet
        self._shown = 0  # characters of the text of anchor and pending that are out
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")  # of byte tokens beyond ASCII

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; often "" inside a character."""
        if not self._tokenizer.is_audible(token_id):
            return ""
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None and not byte.isascii():
            piece = self._release() + self._bytes.decode(byte)
            # A byte alone may be no character; a letter's byte token is one, and stands for whatever came before.
            self._move_anchor([self._tokenizer.letter_token])
            return piece
        return self._bytes.decode(b"", final=True) + self._push_whole(token_id)

    def finish(self) -> str:
        """The rest. A character that was cut off at the end is one replacement character."""
        return self._release() + self._bytes.decode(b"", final=True)

    def _push_whole(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text()
        if not text.endswith(_REPLACEMENT):
            piece = text[self._shown :]
            self._move_anchor(self._pending)
            return piece
        if len(self._pending) <= _MAX_CUT_TOKENS:
            return ""
        # More tokens than one character can have: only the last replacement may still turn into something.
        piece = text[self._shown : -1]
        self._anchor, self._pending = [], self._pending[-_MAX_CUT_TOKENS:]
        self._shown = len(self._text()) - 1
        return piece

    def _release(self) -> str:
        piece = self._text()[self._shown :]
        self._shown += len(piece)
        return piece

    def _move_anchor(self, token_ids: list[int]) -> None:
        self._anchor, self._pending = token_ids, []
        is_one = len(token_ids) == 1  # nearly always
        self._shown = self._tokenizer.length_alone(token_ids[0]) if is_one else len(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode_raw(self._anchor + self._pending)


def prompt_of_nothing(bos_token_id: int | None) -> list[int]:
    """The token ids of an empty prompt: the BOS token, which every text starts with where a model has one.

    Raises RequestError where it has none.
    """
    if bos_token_id is None:
        raise RequestError(
            "prompt: empty, and this model has no BOS token to start from; send at least one token", "prompt"
        )
    return [bos_token_id]
