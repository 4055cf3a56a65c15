"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, WithJsonSchema

from vtoken.base.errors import RequestError
from vtoken.base.validation import setting
from vtoken.server.protocol.fields import RequestFields

_SWITCH = "true or false"


class TokenizeRequest(RequestFields):
    """Token ids of a prompt, or of a conversation in the model's chat format."""

    model: str | None = setting("Name of the model.", expected="text", default=None)
    prompt: str | None = setting("Text; this or messages.", expected="text", default=None)
    messages: list[Any] | None = setting("A conversation; this or prompt.", expected="a list of messages", default=None)
    add_special_tokens: bool = setting(
        "With what the tokenizer puts around a prompt; not for messages, whose template has it.",
        expected=_SWITCH,
        default=True,
    )
    add_generation_prompt: bool = setting("Begin the assistant's message.", expected=_SWITCH, default=True)
    continue_final_message: bool = setting("End inside the last message.", expected=_SWITCH, default=False)
    tools: list[Any] | None = setting("Functions for the template.", expected="a list of tools", default=None)
    chat_template_kwargs: dict[str, Any] | None = setting(
        "More that the template asks for.", expected="an object", default=None
    )
    return_token_strs: bool = setting("Also return the text of each token.", expected=_SWITCH, default=False)

    def check_together(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt: expected either prompt or messages", "prompt")


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestFields):
    """The text of token ids, special tokens included."""

    model: str | None = setting("Name of the model.", expected="text", default=None)
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})] = setting(
        "Token ids.", expected="a list of token ids"
    )


class DetokenizeResponse(BaseModel):
    prompt: str
