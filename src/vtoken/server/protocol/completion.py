"""`/v1/completions`: request, response, stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from vtoken.base.errors import RequestError
from vtoken.base.kv_retention import KV_PIN_EXPECTED, KVPins
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.validation import setting, shorten
from vtoken.engine.prompts import Prompt
from vtoken.server.protocol.common import PromptLogprobs, Usage
from vtoken.server.protocol.fields import PINS_SCHEMA, SamplingFields, sampling_params

_PROMPTS = "text, token ids, or a list of texts or of lists of token ids"
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _TOKENS,
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}


class CompletionRequest(SamplingFields):
    """Go on with one or more prompts."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = setting("What to go on with.", expected=_PROMPTS)
    max_tokens: Annotated[int, Field(ge=0, lt=2**63)] = setting(
        "The most new tokens of a choice; 0 only with echo, to score a prompt.",
        expected="a whole number from 1 up, or 0 with echo",
        default=16,
    )
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = setting(
        "Return the log-probability of each token, and of so many likeliest ones beside it.",
        expected="a whole number from 0 up",
        default=None,
    )
    echo: bool = setting("Begin each choice with the prompt.", expected="true or false", default=False)
    kv_pin: Annotated[KVPins, WithJsonSchema(PINS_SCHEMA)] = setting(
        "Parts of the prompt that never die.", expected=KV_PIN_EXPECTED, default=()
    )
    suffix: str | None = setting("What follows the answer; not supported but for ''.", expected="text", default=None)

    @property
    def renamed(self) -> dict[str, str]:
        is_scored = self.echo and self.logprobs is not None
        return super().renamed | ({"prompt_logprobs": "logprobs"} if is_scored else {})

    def check_together(self) -> None:
        super().check_together()
        if self.suffix:
            raise RequestError("suffix: filling in a middle is not supported", "suffix")
        if self.num_new_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 needs echo=true, or there is nothing to answer", "max_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs: cannot be had with stream=true; echo and logprobs can", "prompt_logprobs"
            )

    @property
    def num_new_tokens(self) -> int:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompts(self, most: int) -> list[Prompt]:
        """One or many. What is in a list of token ids is checked where it is looked at anyway."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise RequestError(f"prompt: expected {_PROMPTS}, got {shorten(prompt)}", "prompt")
        if not prompt:
            raise RequestError(f"prompt: expected {_PROMPTS}, got an empty list", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        if len(prompt) > most:
            raise RequestError(
                f"prompt: at most {most} prompts in one request (max_prompts), got {len(prompt)}", "prompt"
            )
        for each in prompt:
            if not isinstance(each, str | list):
                raise RequestError(f"prompt: expected {_PROMPTS}, got {shorten(each)} in a list", "prompt")
        return prompt

    def params(self) -> SamplingParams:
        values: dict[str, Any] = {"max_tokens": max(1, self.num_new_tokens)}  # 0: the one is drawn, and left out
        if self.num_new_tokens or self.logprobs is None:
            values["logprobs"] = self.logprobs
        if self.echo and self.logprobs is not None:
            values["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return sampling_params(self, **values)


class CompletionLogprobs(BaseModel):
    """Of each token; the first of a prompt (with echo) has none. Offsets are characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = Field(description="The stop text or token that ended the choice.")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(BaseModel):
    """A whole answer; in a stream, the part of it that an event has."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
