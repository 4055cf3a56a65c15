"""What requests have in common: how they are read, and the fields that say how to draw.

The one home of "field of a request -> SamplingParams": most fields *are* those of `SamplingParams`, with their checks
and their words; what JSON or OpenAI spells in another way is spelled out here.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, create_model

from vtoken.base.errors import RequestError
from vtoken.base.kv_retention import KV_BUDGET_EXPECTED, KVBudget
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.structured_outputs import StructuredOutputsParams
from vtoken.base.validation import Settings, setting, shorten

logger = logging.getLogger("vtoken.server")

MAX_STOPS = 256  # texts; each is looked for at every token
_FEW = ("stop", "bad_words")
_MAX_MEMBERS = 1 << 18  # of any other list or object: as many as a vocabulary has tokens
_UNLIMITED = ("prompt", "messages", "tools")  # their size is that of the body, and the engine looks at them

_SWITCH = "true or false"
_NUMBERS_BY_TOKEN = "an object of token ids, as text, and numbers from -100 to 100"

_FORMATS = "an object with the type 'text', 'json_object' or 'json_schema', and with the last one a json_schema"
_FORMAT_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "schema": {"type": "object"}},
            "required": ["schema"],
        },
    },
    "required": ["type"],
}

PINS_SCHEMA = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}


_LONGEST_NAME = 40  # of a field that is compared with those that are known
_MOST_TOLD = 100  # mistyped names that the log is told of
_MOST_HINTS = 8  # and those that the client is
_told: set[str] = set()


class RequestFields(Settings):
    """A request as decoded JSON. Fields that are not known are taken and ignored, as clients expect; null is the
    default. What is wrong with one that is known is a RequestError that names it."""

    model_config = ConfigDict(extra="ignore")
    kind: ClassVar[str] = "field"
    example: ClassVar[str] = "model='...'"
    _hints: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def refuse(cls, message: str, field: str | None) -> RequestError:
        return RequestError(message, field)

    @classmethod
    def parse(cls, body: object) -> Self:
        if not isinstance(body, dict):
            raise RequestError(f"the body: expected a JSON object, got {shorten(body)}", None)
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            most = MAX_STOPS if name in _FEW else _MAX_MEMBERS
            is_limited = isinstance(value, list | dict) and name in cls.model_fields and name not in _UNLIMITED
            if is_limited and len(value) > most:
                raise RequestError(f"{name}: expected at most {most} members, got {len(value)}", name)
        known = tuple(cls.model_fields)
        ignored = sorted(given.keys() - cls.model_fields)
        hints = {name: hint for name in ignored if (hint := _hint(name, known))}
        _tell_ignored(ignored, hints)
        try:
            asked = cls(**given)
        except RequestError as error:
            meant = [name for name, hint in hints.items() if f"{error.field!r}" in hint]
            raise RequestError(f"{error} (there is {meant[0]!r})" if meant else str(error), error.field) from None
        asked._hints = tuple(f"{name!a}: {hint}" for name, hint in hints.items())
        return asked

    @property
    def headers(self) -> dict[str, str]:
        """Of the response: which fields were ignored though they look as if something else had been meant."""
        return {"X-Ignored-Fields": "; ".join(self._hints[:_MOST_HINTS])} if self._hints else {}


@lru_cache(maxsize=1024)
def _hint(name: str, known: tuple[str, ...]) -> str | None:
    """What somebody who sent a field that means nothing here is likely to have meant."""
    if len(name) > _LONGEST_NAME:
        return None
    if name in SamplingParams.elsewhere:
        return SamplingParams.elsewhere[name]
    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"did you mean {close[0]!r}?" if close else None


def _tell_ignored(names: list[str], hints: dict[str, str]) -> None:
    """Clients send many fields that mean nothing here; one that looks mistyped is worth a line, once."""
    for name in names:
        if name not in hints:
            logger.debug("a field that means nothing here: %s", shorten(name))
        elif name not in _told and len(_told) < _MOST_TOLD:
            _told.add(name)
            logger.warning("a request had the field %r, which is ignored; %s", name, hints[name])


def _as_bias(bias: Any) -> Any:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise ValueError(f"expected {_NUMBERS_BY_TOKEN}, got {shorten(bias)}")
    by_token = {}
    for token, value in bias.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) <= 10 and is_number):
            raise ValueError(f"expected {_NUMBERS_BY_TOKEN}, got {shorten({token: value})}")
        by_token[int(token)] = value
    return by_token


class StreamOptions(BaseModel):
    """What a stream tells besides the text."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(RequestFields):
    """Fields of completions and chats that say nothing of the draw."""

    model: str = setting("Name of the model, one of those that /v1/models lists.", expected="text")
    stream: bool = setting("Send the answer as server-sent events while it grows.", expected=_SWITCH, default=False)
    stream_options: StreamOptions | None = setting(
        "include_usage: a last event with the usage; continuous_usage_stats: in every event.",
        expected="an object with include_usage, true or false",
        default=None,
    )
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**63)] | None = setting(
        "The newer name of max_tokens, and it counts if both are there.",
        expected="a whole number from 1 up",
        default=None,
    )
    cache_salt: str | None = setting(
        "Requests with different ones never share cached blocks.", expected="text", default=None, min_length=1
    )
    user: str | None = setting("Taken, and not looked at.", expected="text", default=None)
    return_token_ids: bool = setting(
        "Also return the token ids of answers, and of the prompt.", expected=_SWITCH, default=False
    )
    return_tokens_as_token_ids: bool = setting(
        "Name tokens in logprobs as token_id:123.", expected=_SWITCH, default=False
    )
    skip_special_tokens: bool = setting("Special tokens have no text; only true.", expected=_SWITCH, default=True)

    # As JSON has them, these are spelled otherwise than in Python.
    logit_bias: Annotated[
        dict[int, float] | None,
        BeforeValidator(_as_bias),
        WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
    ] = setting(SamplingParams.model_fields["logit_bias"].description or "", expected=_NUMBERS_BY_TOKEN, default=None)
    kv_policy: str | None = setting(
        "Which tokens may die, instead of the server's policy; /v1/models lists none, `vtoken policies` does.",
        expected="the name of a policy, or 'name:parameter=value'",
        default=None,
        min_length=1,
    )
    kv_budget: Annotated[
        KVBudget | None, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 2**31 - 1})
    ] = setting("Tokens that are safe, instead of the server's budget.", expected=KV_BUDGET_EXPECTED, default=None)
    response_format: Annotated[dict[str, Any] | None, WithJsonSchema(_FORMAT_SCHEMA)] = setting(
        "The form that the answer must have: any text, a JSON object, or JSON after a schema.",
        expected=_FORMATS,
        default=None,
    )

    @property
    def sends_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def sends_usage_always(self) -> bool:
        return self.sends_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def renamed(self) -> dict[str, str]:
        """Names that the engine's messages have -> what this request calls the same."""
        renamed = {}
        if self.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        if self.response_format is not None:
            renamed["structured_outputs: json"] = "response_format: json_schema"
            renamed["structured_outputs"] = "response_format"
        return renamed

    def check_together(self) -> None:
        """Raise RequestError for fields that do not go together, or ask for what there is not."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: has no effect without stream=true", "stream_options")
        if not self.skip_special_tokens:
            raise RequestError(
                "skip_special_tokens: special tokens have no text here; return_token_ids shows them",
                "skip_special_tokens",
            )


# Each route has these in its own way, or `CommonFields` has.
_SPELLED_OUT = {"max_tokens", "logprobs", "kv_pin", *CommonFields.model_fields}
_PYTHON_ONLY = {"logits_processors"}
_SHARED = {
    name: (field.annotation, field)
    for name, field in SamplingParams.model_fields.items()
    if name not in _SPELLED_OUT | _PYTHON_ONLY
}

if TYPE_CHECKING:

    class SamplingFields(CommonFields):
        """The fields of `SamplingParams` that JSON spells as Python does."""

        n: int
        prompt_logprobs: int | None
        structured_outputs: StructuredOutputsParams | None

else:
    SamplingFields = create_model("SamplingFields", __base__=CommonFields, **_SHARED)


def sampling_params(fields: SamplingFields, **values: Any) -> SamplingParams:
    """The parameters that a request asks for, `values` above all. Raises RequestError."""
    given = {name: getattr(fields, name) for name in SamplingParams.names() if name in fields.model_fields_set}
    form = _structure(fields.response_format)
    if form is not None:
        if fields.structured_outputs is not None:
            raise RequestError("response_format: contradicts structured_outputs; give one of them", "response_format")
        given["structured_outputs"] = form
    return SamplingParams(**{**given, **values})


def _structure(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's `response_format` as `structured_outputs`; None: any text."""
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_object":
        return {"json_object": True}
    named = wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if wanted.get("type") != "json_schema" or not isinstance(schema, dict):
        raise RequestError(f"response_format: expected {_FORMATS}, got {shorten(wanted)}", "response_format")
    return {"json": schema}
