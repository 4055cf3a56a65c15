"""`/v1/chat/completions`: request, response, stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from vtoken.base.errors import RequestError
from vtoken.base.kv_retention import KV_PIN_EXPECTED, KVPins
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.validation import setting
from vtoken.server.protocol.common import PromptLogprobs, Usage
from vtoken.server.protocol.fields import PINS_SCHEMA, SamplingFields, sampling_params

SYSTEM = "system"
_SWITCH = "true or false"
_TOOL_CHOICES = "'none' or 'auto': a call cannot be forced here"
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": _CONTENT,
        },
        "required": ["role"],
    },
}


class ChatRequest(SamplingFields):
    """Answer a conversation in the model's chat format."""

    messages: Annotated[list[Any], WithJsonSchema(_MESSAGES)] = setting(
        "The conversation; content is text, a list of text parts, or null.", expected="a list of messages"
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = setting(
        "The most new tokens of a choice; without it, all the room there is.",
        expected="a whole number from 1 up",
        default=None,
    )
    logprobs: bool = setting("Return the log-probability of each token.", expected=_SWITCH, default=False)
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = setting(
        "Likeliest tokens to name beside each token; needs logprobs.",
        expected="a whole number from 0 up",
        default=None,
    )
    tools: Annotated[list[Any] | None, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = setting(
        "Functions that the chat template tells the model of; a call is part of the answer's text.",
        expected="a list of tools",
        default=None,
    )
    tool_choice: Literal["none", "auto"] | None = setting(
        "none: the model is not told of the tools.", expected=_TOOL_CHOICES, default=None
    )
    kv_pin: Annotated[
        KVPins | Literal["system"],
        WithJsonSchema({"anyOf": [{"const": SYSTEM}, PINS_SCHEMA]}),
    ] = setting(
        "Parts of the prompt that never die; 'system': what the system messages say.",
        expected=f"{KV_PIN_EXPECTED}, or 'system'",
        default=(),
    )
    add_generation_prompt: bool = setting("Begin the assistant's message.", expected=_SWITCH, default=True)
    continue_final_message: bool = setting(
        "Go on with the last message; needs add_generation_prompt=false.", expected=_SWITCH, default=False
    )
    chat_template: str | None = setting(
        "A Jinja template instead of the server's, where the server allows it.",
        expected="a Jinja template",
        default=None,
        min_length=1,
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        'More that the template asks for, such as {"enable_thinking": false}.', expected="an object", default=None
    )
    echo: bool = setting("Not supported here, only false.", expected=_SWITCH, default=False)

    @property
    def renamed(self) -> dict[str, str]:
        return super().renamed | {"prompt": "messages", "logprobs": "top_logprobs"}

    def check_together(self) -> None:
        super().check_together()
        if self.max_completion_tokens == 0:
            raise RequestError(
                "max_completion_tokens: expected a whole number from 1 up, got 0", "max_completion_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs=true", "top_logprobs")
        if self.echo:
            raise RequestError("echo: not supported in chats", "echo")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs: cannot be had with stream=true", "prompt_logprobs")

    @property
    def pins_system(self) -> bool:
        return self.kv_pin == SYSTEM

    @property
    def told_tools(self) -> list[Any] | None:
        return None if self.tool_choice == "none" else self.tools

    def params(self, pins: KVPins | None = None) -> SamplingParams:
        """`pins`: where the system messages are, if they are to be pinned."""
        return sampling_params(
            self,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            kv_pin=(pins or ()) if self.pins_system else self.kv_pin,
        )


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = Field(description="The stop text or token that ended the choice.")
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(BaseModel):
    """The first of a choice has its role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
