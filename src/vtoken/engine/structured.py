"""Answers of a given form: grammars compiled by llguidance, and where each answer stands in its own.

docs/structured-output.md says why llguidance. Masks are made here, above the scheduler, which hands them down as bits.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vtoken.base.errors import RequestError, describe
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.structured_outputs import StructuredOutputsParams
from vtoken.engine.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("vtoken")

MAX_CACHED = 64  # compiled grammars an engine keeps, each of some 10 KiB to some MiB
MAX_FORM_SIZE = 2**20  # characters of a grammar: what takes about a second to compile
_LONGEST_REASON = 200  # characters of what the library says
_FIELD = "structured_outputs"

Words = NDArray[np.uint32]


class Grammars:
    """The grammars of an engine, by tokenizer and form: compiled once, kept while they are in use.

    Threads may call it at once, so a front end can let `constraint` do the work before it hands a request to the
    engine's thread, which then finds the grammar here.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = Lock()
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[tuple[object, ...], LLMatcher] = OrderedDict()  # the last used comes last

    def constraint(self, params: SamplingParams) -> GrammarConstraint | None:
        """At the beginning of an answer to a request with `params`; None if any text will do.

        Raises RequestError for what cannot be compiled, and for params that contradict it.
        """
        form = params.structured_outputs
        if form is None:
            return None
        if self._tokenizer is None:
            raise _refused("this engine has no tokenizer (skip_tokenizer_init=True), so it knows no text")
        if params.ignore_eos:
            raise _refused("an answer ends where its form is complete, which ignore_eos=True forbids")
        vocabulary = self._read_vocabulary(self._tokenizer)
        ends = [*self._eos, *(token for token in params.stop_token_ids if not self._tokenizer.is_audible(token))]
        return GrammarConstraint(self._matcher(form, vocabulary), vocabulary, vocabulary.words_of(ends))

    def _read_vocabulary(self, tokenizer: Tokenizer) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(tokenizer, self._vocab_size, self._eos)
            return self._vocabulary

    def _matcher(self, form: StructuredOutputsParams, vocabulary: _Vocabulary) -> LLMatcher:
        """At the beginning; to be copied."""
        text = form.schema_text if form.form in ("json", "json_object") else getattr(form, form.form)
        size = len(text) if isinstance(text, str) else sum(map(len, text))
        if size > MAX_FORM_SIZE:
            raise _refused(f"{form.form}: {size} characters are too much to compile; at most {MAX_FORM_SIZE}")
        key = form.form, text, form.disable_any_whitespace, form.whitespace_pattern
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        found = _compile(form, vocabulary)  # may take a second: nobody is to wait for it who asks for another one
        with self._lock:
            self._compiled[key] = found
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return found


class _Vocabulary:
    """A tokenizer as llguidance sees it, padded to the width of the model's logits, and where the two see differently.

    Reading it takes half a second for 50,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: list[int]) -> None:
        from llguidance.hf import from_tokenizer

        try:
            self.tokens: LLTokenizer = from_tokenizer(tokenizer.backend, vocab_size, eos or None)
        except Exception as error:  # of as many types as there are kinds of tokenizers
            raise _refused(f"llguidance cannot read this model's tokenizer: {_short(describe(error))}") from error
        self.num_words = -(-vocab_size // 32)
        # Ends are allowed by `GrammarConstraint`. A token that has no text in an answer would be no part of its form,
        # unless a grammar names it as a special one.
        ids = range(vocab_size)
        silent = [i for i in ids if not tokenizer.is_audible(i) and not self.tokens.is_special_token(i)]
        self.never = self.words_of([*eos, *self.tokens.eos_tokens, *silent])
        # Sentencepiece's decoders drop a space at the start of a text, which therefore cannot stand for one there. A
        # decoder does so or does not: some tokens tell.
        spaced = [i for i in ids if tokenizer.is_audible(i) and self.tokens.decode_bytes([i]).startswith(b" ")]
        drops = any(
            _num_spaces(tokenizer.decode_raw([i])) < _num_spaces(self.tokens.decode_str([i])) for i in spaced[:32]
        )
        self.never_first = self.words_of(spaced if drops else [])

    def words_of(self, tokens: Iterable[int]) -> Words:
        """[num_words] with the bits of `tokens` set."""
        words = np.zeros(self.num_words, np.uint32)
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words


class GrammarConstraint:
    """Where one answer stands in its grammar; see `TokenConstraint`."""

    def __init__(self, beginning: LLMatcher, vocabulary: _Vocabulary, ends: Words) -> None:
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._vocabulary = vocabulary
        self._ends = ends  # bits of the tokens that may come where the answer is complete
        self._answer: list[int] = []  # what the matcher has consumed
        self._mask: Words | None = None  # without the ends; None until asked for
        self.num_words = vocabulary.num_words
        self.error: str | None = None

    def copy(self) -> GrammarConstraint:
        copy = GrammarConstraint(self._beginning, self._vocabulary, self._ends)
        copy._matcher = self._matcher.deep_copy()
        copy._answer, copy._mask, copy.error = self._answer.copy(), self._mask, self.error
        return copy

    def follow(self, answer: SequenceOf[int]) -> None:
        num_known = len(self._answer)
        if len(answer) == num_known and answer == self._answer:
            return
        self._mask = None
        if len(answer) < num_known or answer[:num_known] != self._answer:  # a beam was given another text
            pairs = enumerate(zip(answer, self._answer, strict=False))
            self._go_back(next((i for i, (new, old) in pairs if new != old), min(len(answer), num_known)))
        tail = list(answer[len(self._answer) :])
        self._answer += tail
        if self.error is None and not self._matcher.consume_tokens(tail):
            self.error = _reason(self._matcher)

    def _go_back(self, num_kept: int) -> None:
        """To behind the first `num_kept` tokens of the answer."""
        num_known = len(self._answer)
        if self.error is None and self._matcher.rollback(num_known - num_kept):
            del self._answer[num_kept:]
            return
        self._matcher, self._answer, self.error = self._beginning.deep_copy(), [], None

    @property
    def is_over(self) -> bool:
        return self.error is None and self._matcher.is_accepting() and not self._allowed().any() and not self.error

    @property
    def can_begin(self) -> bool:
        """Whether any answer, if only the empty one, has the form."""
        return bool(self._allowed().any()) or self._matcher.is_accepting()

    def fill(self, words: Words) -> None:
        words[:] = self._allowed()
        if self.error is None and self._matcher.is_accepting():
            words |= self._ends

    def _allowed(self) -> Words:
        """[num_words] the tokens that go on with the answer."""
        if self._mask is None:
            mask = np.zeros(self.num_words, np.uint32)
            if self.error is None and not self._matcher.is_stopped():
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                mask &= ~self._vocabulary.never
                if not self._answer:
                    mask &= ~self._vocabulary.never_first
            if self._matcher.is_error():  # no token goes on, or a limit of the library on the work of a step
                self.error = self.error or _reason(self._matcher)
                mask[:] = 0
            self._mask = mask
        return self._mask


def _compile(form: StructuredOutputsParams, vocabulary: _Vocabulary) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = _grammar(form)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{form.form}: {_short(str(error))}") from None
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise _refused(f"{form.form}: {_reason(matcher)}")
    for warning in matcher.get_grammar_warnings():
        logger.warning("structured_outputs: %s: %s", form.form, _short(warning))
    # The first mask is the dearest one. What it costs is paid here, and all copies know what was learned.
    first = GrammarConstraint(matcher, vocabulary, ends=vocabulary.words_of([]))
    if not first.can_begin:
        reason = first.error or "no text that can be made of this vocabulary's tokens has that form"
        raise _refused(f"{form.form}: {reason}")
    return first._matcher


def _grammar(form: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form. Raises ValueError for what is none."""
    from llguidance import LLMatcher, grammar_from

    if form.choice is not None:
        # One terminal: as rules, which is what the library makes of choices, the parser follows 2,000 at most.
        return grammar_from("lark", f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, form.choice))}")
    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.grammar is not None:
        return grammar_from("gbnf" if "::=" in form.grammar else "lark", form.grammar)
    spacing: Any = None
    if form.disable_any_whitespace:
        spacing = {"whitespace_flexible": False}
    elif form.whitespace_pattern is not None:
        spacing = {"whitespace_pattern": form.whitespace_pattern}
    return str(LLMatcher.grammar_from_json_schema(form.schema_text, overrides=spacing))


def _refused(reason: str) -> RequestError:
    return RequestError(f"structured_outputs: {reason}", _FIELD)


def _num_spaces(text: str) -> int:
    """That it begins with."""
    return len(text) - len(text.lstrip(" "))


_REASONS = {
    "NoExtension": "no token of this vocabulary goes on with the text so far, which is not complete",
    "NoExtensionBias": "no token of this vocabulary goes on with the text so far, which is not complete",
    "ParserTooComplex": "the grammar is too ambiguous: there are too many ways to read the text so far",
    "LexerTooComplex": "its regular expressions are too complex",
}


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher has failed, in one line."""
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return _REASONS.get(error) or _REASONS.get(matcher.stop_reason()) or _short(error)


def _short(text: str) -> str:
    """One line of what may be many: those below the first draw where in the source the fault is, the regex crate's
    aside, which say there what it is."""
    lines = text.splitlines() or [""]
    line = next((f"wrong expression: {line[7:]}" for line in lines if line.startswith("error: ")), lines[0])
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"
