"""`StructuredOutputsParams`: the form that a request's answer must have. Names and meanings are vLLM's."""

from __future__ import annotations

import json as json_module
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, Strict, field_validator, model_validator

from vtoken.base.errors import RequestError
from vtoken.base.validation import Settings, setting

KINDS = ("json", "json_object", "regex", "choice", "grammar")
_ONLY_LLGUIDANCE = "vtoken builds every grammar by llguidance, so there is nothing to choose"

_Text = Annotated[str, Field(min_length=1)]

with warnings.catch_warnings():
    # pydantic's own `json` is deprecated, and the field has to be called what vLLM calls it.
    warnings.filterwarnings("ignore", message='Field name "json"')

    class StructuredOutputsParams(Settings):
        """The form of an answer: exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`.

        Raises RequestError, with `.field` set, for a wrong type or an unknown name, for none of them or for several.
        """

        kind: ClassVar[str] = "setting of structured_outputs"
        example: ClassVar[str] = "regex='[0-9]+'"
        elsewhere: ClassVar[Mapping[str, str]] = {
            "backend": _ONLY_LLGUIDANCE,
            "disable_fallback": _ONLY_LLGUIDANCE,
            "disable_additional_properties": 'write "additionalProperties": false into the schema\'s objects',
            "structural_tag": "not there yet; grammar=... can say where which text stands",
        }

        json: str | dict[str, Any] | None = setting(  # type: ignore[assignment]
            "A JSON schema, as a dict or as text.", expected="a JSON schema: a dict, or its text", default=None
        )
        json_object: bool = setting("Any JSON object.", expected="True or False", default=False)
        regex: _Text | None = setting(
            "A regular expression for the whole answer.",
            expected="a regular expression, not empty, without look-around and back-references",
            default=None,
        )
        choice: Annotated[tuple[_Text, ...], Strict(False), Field(min_length=1)] | None = setting(
            "The only answers there are.", expected="a list of at least one text, none of them empty", default=None
        )
        grammar: _Text | None = setting(
            "A context-free grammar: GBNF, as llama.cpp has it, or Lark as llguidance reads it.",
            expected="a grammar with a rule `root ::= ...` (GBNF) or `start: ...` (Lark)",
            default=None,
        )
        disable_any_whitespace: bool = setting(
            "JSON without whitespace between its parts; else any JSON allows is allowed.",
            expected="True or False",
            default=False,
        )
        whitespace_pattern: _Text | None = setting(
            "A regular expression for the whitespace between the parts of JSON.",
            expected="a regular expression, not empty, and `json` or `json_object` beside it",
            default=None,
        )

        @classmethod
        def refuse(cls, message: str, field: str | None) -> RequestError:
            return RequestError(message, field)

        @field_validator("json")
        @classmethod
        def _is_a_schema(cls, json: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
            try:
                schema = json_module.loads(json) if isinstance(json, str) else json
                json_module.dumps(schema, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"expected a JSON schema: a dict, or its text; it is no JSON: {error}") from None
            if schema is not None and not isinstance(schema, dict | bool):
                raise ValueError(f"expected a JSON schema: a dict, or its text; got a JSON {type(schema).__name__}")
            return json

        @model_validator(mode="after")
        def _is_one_kind(self) -> Self:
            given = [name for name in KINDS if getattr(self, name) not in (None, False)]
            if len(given) != 1:
                found = " and ".join(given) or "none of them"
                raise ValueError(f"expected exactly one of {', '.join(KINDS)}, got {found}")
            spaced = self.disable_any_whitespace or self.whitespace_pattern is not None
            if spaced and given[0] not in ("json", "json_object"):
                raise ValueError(f"disable_any_whitespace and whitespace_pattern are for JSON, not for {given[0]}")
            if self.disable_any_whitespace and self.whitespace_pattern is not None:
                raise ValueError("disable_any_whitespace and whitespace_pattern contradict each other")
            return self

        @property
        def form(self) -> str:
            """Which of the kinds it is."""
            return next(name for name in KINDS if getattr(self, name) not in (None, False))

        @property
        def schema_text(self) -> str:
            """The schema of `json` or `json_object`. Properties keep their order, which is that of the answer."""
            if self.json_object:
                return '{"type": "object"}'
            return self.json if isinstance(self.json, str) else json_module.dumps(self.json, ensure_ascii=False)
