"""`SamplingParams`: how the tokens of one request are drawn. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator

from vtoken.base.errors import RequestError
from vtoken.base.kv_retention import (
    KV_BUDGET_EXPECTED,
    KV_PIN_EXPECTED,
    KV_POLICY_EXPECTED,
    KV_PREFILL_STRIDE_EXPECTED,
    KV_PROMPT_END_EXPECTED,
    KV_STRIDE_EXPECTED,
    KVBudget,
    KVPins,
    KVPolicy,
    KVPrefillStride,
    KVPromptEnd,
    KVStride,
    KVTrigger,
)
from vtoken.base.logits_processors import takes_prompt
from vtoken.base.structured_outputs import StructuredOutputsParams
from vtoken.base.validation import Settings, setting, shorten

MAX_N = 1024  # choices of one request; the engine refuses sooner when they cannot run together
MAX_LENGTH_PENALTY = 30.0  # any length to this power is a float, and so is what is divided by it
MAX_TEMPERATURE = 100.0  # far past the point where every distribution is flat, and safe in float32
_INT32_MAX = 2**31 - 1

# A stream of random numbers is keyed by 64 bits, so that is what a seed may have, signed or not.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
SEED_EXPECTED = "a whole number from -2**63 to 2**64 - 1, or None (random)"

_TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
# The sequence may be a list, a set or a tuple; its members stay strict.
_Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Strict(False),
    BeforeValidator(lambda texts: () if texts is None else (texts,) if isinstance(texts, str) else texts),
]
_NumLogprobs = Annotated[int, Field(ge=0, le=_INT32_MAX)]
_LOGPROBS_EXPECTED = "a whole number from 0 (the tokens themselves) to the engine's max_logprobs, or None (off)"
_TokenIds = Annotated[tuple[_TokenId, ...], Strict(False), BeforeValidator(lambda ids: () if ids is None else ids)]

_SWITCH = "True or False"
# What changes the draw or the text of an answer has no meaning in a search, or none that is settled.
_NOT_WITH_BEAMS = (
    "top_k",
    "top_p",
    "min_p",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "logits_processors",
    "logprobs",
)


def _check_arguments(functions: tuple[Callable[..., Any], ...]) -> tuple[Callable[..., Any], ...]:
    for function in functions:
        takes_prompt(function)
    return functions


_Processors = Annotated[
    tuple[Callable[..., Any], ...],
    Strict(False),
    BeforeValidator(lambda each: () if each is None else (each,) if callable(each) else each),
    AfterValidator(_check_arguments),
]
_STRUCTURED = "use structured_outputs={'json': schema}, or regex, choice, grammar, json_object in its place"


def _read_structured(given: object) -> object:
    if not isinstance(given, Mapping):
        return given
    return StructuredOutputsParams(**{str(name): value for name, value in given.items()})


_Structured = Annotated[StructuredOutputsParams, BeforeValidator(_read_structured)]


class SamplingParams(Settings):
    """How to draw the tokens of one request, in this order: tokens that may not come and `logit_bias`, penalties,
    `logits_processors`, `structured_outputs`, temperature, `min_p`, `top_k`, `top_p`.

    Raises RequestError, with `.field` set, for a wrong type, a value out of range, NaN, infinity or an unknown name.
    """

    kind: ClassVar[str] = "sampling parameter"
    example: ClassVar[str] = "temperature=0.8"
    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("guided_decoding", "guided_json", "guided_regex", "guided_choice"), _STRUCTURED),
        **dict.fromkeys(("guided_grammar", "guided_json_object", "response_format"), _STRUCTURED),
    }

    n: int = setting(
        "Choices to draw from the same prompt, which they share in memory.",
        expected=f"a whole number from 1 to {MAX_N}",
        default=1,
        ge=1,
        le=MAX_N,
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = setting(
        "Choices to draw, of which the n with the highest mean log-probability are returned, best first.",
        expected=f"a whole number from n to {MAX_N}, or None (n)",
        default=None,
    )
    use_beam_search: bool = setting(
        "Search for the likeliest answers instead of drawing: best_of (or n) beams, of which the n best are returned.",
        expected=_SWITCH,
        default=False,
    )
    length_penalty: float = setting(
        "Beam search divides the log-probability of an answer by its length to this power; below 0 short ones win.",
        expected=f"a number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
        default=1.0,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
    )
    early_stopping: bool | Literal["never"] = setting(
        "Beam search ends when there are as many finished answers as beams (True), when those that run are not likely "
        'to become better (False), or when they cannot ("never").',
        expected="True, False or 'never'",
        default=False,
    )
    temperature: float = setting(
        "Divides the logits; 0 (in fact anything below 1e-5) always takes the likeliest token.",
        expected=f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}",
        default=1.0,
        ge=0,
        le=MAX_TEMPERATURE,
    )
    top_k: int = setting(
        "Draw from the k likeliest tokens only; 0 or -1: from all.",
        expected=f"a whole number from 1 to {_INT32_MAX}, or 0 or -1 (off)",
        default=0,
        ge=-1,
        le=_INT32_MAX,
    )
    top_p: float = setting(
        "Draw from the likeliest tokens that together have this probability; 1: from all.",
        expected="a number above 0 and up to 1 (off)",
        default=1.0,
        gt=0,
        le=1,
    )
    min_p: float = setting(
        "Draw from tokens at least this likely, as a share of the likeliest one's probability; 0: from all.",
        expected="a number from 0 (off) to 1",
        default=0.0,
        ge=0,
        le=1,
    )
    seed: Seed | None = setting(
        "Same seed, same answer, whatever runs beside it; choice i draws from the stream of (seed, i).",
        expected=SEED_EXPECTED,
        default=None,
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = setting(
        "The most new tokens of a choice, clamped to the room that max_model_len leaves, or all of that room.",
        expected="a whole number from 1 up, or None (the room left)",
        default=16,
    )
    ignore_eos: bool = setting(
        "Go on past the model's end-of-sequence tokens; stop_token_ids still stop.",
        expected=_SWITCH,
        default=False,
    )
    stop_token_ids: _TokenIds = setting(
        "Further tokens that end a choice.",
        expected="a sequence of token ids, whole numbers from 0 up",
        default=(),
    )

    stop: _Texts = setting(
        "Texts that end a choice where they come up in it, in whatever tokens; they are no part of its text.",
        expected="a text that is not empty, or a sequence of such texts",
        default=(),
    )
    include_stop_str_in_output: bool = setting(
        "Leave a text of `stop`, or the stop id, that ended a choice in its text.", expected=_SWITCH, default=False
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**63)] = setting(
        "The fewest new tokens: before that nothing ends a choice, since what would end it is not drawn.",
        expected="a whole number from 0 up, no more than max_tokens",
        default=0,
    )

    repetition_penalty: float = setting(
        "Divides the positive logits of tokens that prompt or answer have used, multiplies the negative ones; 1: off.",
        expected="a number from 1e-6 to 1e6; above 1 it makes repetition rarer",
        default=1.0,
        ge=1e-6,  # float32 holds any logit divided by it
        le=1e6,
    )
    presence_penalty: float = setting(
        "Taken off the logits of tokens that the answer has used.",
        expected="a number from -2 to 2; above 0 it makes repetition rarer",
        default=0.0,
        ge=-2,
        le=2,
    )
    frequency_penalty: float = setting(
        "Taken off the logits of tokens that the answer has used, as often as it has.",
        expected="a number from -2 to 2; above 0 it makes repetition rarer",
        default=0.0,
        ge=-2,
        le=2,
    )
    logit_bias: dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = setting(
        "Added to the logits of single tokens: token id -> from -100, which all but rules it out, to 100.",
        expected="a dict of token ids and numbers from -100 to 100, or None",
        default=None,
    )
    allowed_token_ids: Annotated[tuple[_TokenId, ...], Strict(False), Field(min_length=1)] | None = setting(
        "The only tokens that may be drawn.",
        expected="a sequence of at least one token id, whole numbers from 0 up, or None (all)",
        default=None,
    )

    bad_words: _Texts = setting(
        "Texts that are never completed: neither as the tokenizer spells them, nor with a space in front. Only the "
        "answer is looked at.",
        expected="a text that is not empty, or a sequence of such texts",
        default=(),
    )
    structured_outputs: _Structured | None = setting(
        "The form that the answer must have: `{'json': schema}`, or `json_object`, `regex`, `choice`, `grammar`.",
        expected="StructuredOutputsParams, or a dict of its fields, or None (any text)",
        default=None,
    )
    logits_processors: _Processors = setting(
        "Functions that change the logits: `f(output_token_ids, logits)`, or, of three arguments, "
        "`f(prompt_token_ids, output_token_ids, logits)`, return logits.",
        expected="a function of two or three arguments, or a sequence of them",
        default=(),
    )

    logprobs: _NumLogprobs | None = setting(
        "Return the log-probability of each token of an answer, and of so many likeliest ones beside it: those of "
        "the model itself, before penalties, biases and temperature.",
        expected=_LOGPROBS_EXPECTED,
        default=None,
    )
    prompt_logprobs: _NumLogprobs | None = setting(
        "The same of each token of the prompt; all of it is computed then, whatever is cached.",
        expected=_LOGPROBS_EXPECTED,
        default=None,
    )

    kv_policy: KVPolicy | None = setting(
        "Which tokens may die, instead of the engine's kv_policy.", expected=KV_POLICY_EXPECTED, default=None
    )
    kv_budget: KVBudget | None = setting(
        "Tokens that are safe, instead of the engine's kv_budget.", expected=KV_BUDGET_EXPECTED, default=None
    )
    kv_trigger: KVTrigger | None = setting(
        "When tokens die, instead of the engine's kv_trigger.", expected="'pressure', 'always' or None", default=None
    )
    kv_stride: KVStride | None = setting(
        "Tokens from one eviction to the next, instead of the engine's kv_stride.",
        expected=KV_STRIDE_EXPECTED,
        default=None,
    )
    kv_prefill_stride: KVPrefillStride | None = setting(
        "The same in the prompt, instead of the engine's kv_prefill_stride.",
        expected=KV_PREFILL_STRIDE_EXPECTED,
        default=None,
    )
    kv_pin: KVPins = setting(
        "Parts of the prompt that never die, as positions [start, end).", expected=KV_PIN_EXPECTED, default=()
    )
    kv_prompt_end: KVPromptEnd | None = setting(
        "How many tokens of the prompt are its prompt as far as eviction goes; in the rest tokens die as in an answer. "
        "For asking what a memory still knows, or scoring an answer.",
        expected=KV_PROMPT_END_EXPECTED,
        default=None,
    )

    @classmethod
    def refuse(cls, message: str, field: str | None) -> RequestError:
        return RequestError(message, field)

    @property
    def num_choices(self) -> int:
        """Choices that are drawn, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def choices_field(self) -> str:
        """The field that says so."""
        return "n" if self.best_of is None else "best_of"

    @property
    def num_logprobs(self) -> int:
        """Likeliest tokens to be named beside each token that is drawn; -1 = what is drawn needs no scores."""
        if self.logprobs is not None:
            return self.logprobs
        is_ranked = self.num_choices > self.n and not self.use_beam_search
        return 0 if is_ranked else -1

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.num_choices < self.n:
            raise ValueError(f"best_of: {self.best_of} choices cannot give the n={self.n} best of them")
        if not self.use_beam_search:
            changed = self._changed(("length_penalty", "early_stopping"))
            if changed:
                raise ValueError(f"{changed[0]}: has no effect without use_beam_search=True")
            return self
        if self.num_choices < 2:
            raise ValueError("use_beam_search: one beam is greedy search: set temperature=0, or best_of to more beams")
        changed = self._changed(_NOT_WITH_BEAMS)
        if self.temperature not in (0.0, 1.0):
            changed.append("temperature")
        if changed:
            raise ValueError(
                f"use_beam_search: cannot be combined with {', '.join(changed)}: a search goes by the model alone"
            )
        return self

    def _changed(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for tokens that do not exist in a vocabulary of `vocab_size` tokens."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for field, tokens in named.items():
            strange = [token for token in tokens if token >= vocab_size]
            if strange:
                message = f"{field}: expected token ids below the vocabulary size {vocab_size}, got {shorten(strange)}"
                raise RequestError(message, field)
