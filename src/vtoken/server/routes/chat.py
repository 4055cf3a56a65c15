"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal, cast
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from vtoken.base.errors import RequestError, VtokenError
from vtoken.engine.async_llm import RequestStream
from vtoken.engine.outputs import CompletionOutput, RequestOutput
from vtoken.server.answers import Tally, finish_all, read_all, start_all
from vtoken.server.body import read_json
from vtoken.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from vtoken.server.openapi import takes
from vtoken.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    Delta,
)
from vtoken.server.state import ServerState, state_of
from vtoken.server.streaming import DONE, EventStream, Template, event, until_disconnect
from vtoken.server.system_pins import find_system

router = APIRouter(tags=["answers"])


@router.post("/v1/chat/completions", **takes(ChatRequest, ChatResponse, streams=True))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    asked = ChatRequest.parse(await read_json(request, state))
    state.check_model(asked.model)
    state.check_ready()
    asked.check_together()
    try:
        if asked.stream:
            chat = await until_disconnect(request, _started(state, asked))
            return EventStream(chat.events(), asked.renamed, asked.headers)
        chat, output = await until_disconnect(request, _finished(state, asked))
    except VtokenError as error:
        raise state.explain(error, asked.renamed) from error
    content = chat.whole(output).model_dump_json(exclude_unset=True)
    return Response(content, media_type="application/json", headers=asked.headers)


async def _started(state: ServerState, asked: ChatRequest) -> Chat:
    chat = await _prepare(state, asked)
    await start_all([chat.stream])
    return chat


async def _finished(state: ServerState, asked: ChatRequest) -> tuple[Chat, RequestOutput]:
    chat = await _prepare(state, asked)
    [output] = await finish_all([chat.stream])
    return chat, output


async def _prepare(state: ServerState, asked: ChatRequest) -> Chat:
    rendering = _rendering(state, asked)
    pins = None
    if asked.pins_system:
        pins = await state.llm.with_tokenizer(lambda tokenizer: find_system(tokenizer, asked.messages, rendering))
    kind: Literal["delta", "final"] = "delta" if asked.stream else "final"
    stream = state.llm.chat(
        asked.messages, asked.params(pins), output_kind=kind, cache_salt=asked.cache_salt, **rendering
    )
    return Chat(state, asked, stream)


def _rendering(state: ServerState, asked: ChatRequest) -> dict[str, Any]:
    """Arguments of `Tokenizer.encode_chat`."""
    if asked.chat_template is not None and not state.settings.trust_request_chat_template:
        raise RequestError(
            "chat_template: this server takes none from requests (trust_request_chat_template)", "chat_template"
        )
    return {
        "tools": asked.told_tools,
        "chat_template": asked.chat_template or state.chat_template,
        "add_generation_prompt": asked.add_generation_prompt,
        "continue_final_message": asked.continue_final_message,
        "chat_template_kwargs": asked.chat_template_kwargs,
    }


class Chat:
    """One request of a client, and how its answer is told."""

    def __init__(self, state: ServerState, asked: ChatRequest, stream: RequestStream) -> None:
        self.stream = stream
        self._asked = asked
        self._names = TokenNames(state.tokenizer, asked.return_tokens_as_token_ids)
        self._tally = Tally()
        self._frame: dict[str, Any] = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
        }
        # Whether a stream tells more of each token than its text.
        self._tells_more = asked.logprobs or asked.return_token_ids or asked.sends_usage_always
        self._templates: dict[int, Template] = {}  # by choice, once its role was told
        self._begun: set[int] = set()  # choices whose role was told

    def whole(self, output: RequestOutput) -> ChatResponse:
        self._tally.add(0, output)
        response = ChatResponse(
            **self._frame,
            object="chat.completion",
            choices=[self._choice(answer) for answer in output.outputs],
            usage=self._tally.usage(),
        )
        if self._asked.return_token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        if self._asked.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return response

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(read_all([self.stream])) as news:
            async for _, output in news:
                self._tally.add(0, output)
                for answer in output.outputs:
                    if self._is_worth_telling(answer):
                        yield self._event_of(answer)
        if self._asked.sends_usage:
            yield event(self._chunk([], usage=self._tally.usage()))
        yield DONE

    def _is_worth_telling(self, answer: CompletionOutput) -> bool:
        """Not inside a character, unless more than the text was asked for."""
        return bool(answer.text) or answer.finished or (self._tells_more and bool(answer.token_ids))

    def _event_of(self, answer: CompletionOutput) -> bytes:
        template = self._templates.get(answer.index)
        if template is not None and not answer.finished:
            return template.fill(answer.text)
        is_first = answer.index not in self._begun
        choice = self._chunk_choice(answer)
        if not (is_first or answer.finished or self._tells_more):  # from now on nothing changes but the text
            self._templates[answer.index] = Template(
                lambda text: self._event([choice.model_copy(update={"delta": Delta(content=text)})])
            )
        return self._event([choice])

    def _event(self, choices: list[ChatChunkChoice]) -> bytes:
        if not self._asked.sends_usage:
            return event(self._chunk(choices))
        return event(self._chunk(choices, usage=self._tally.usage() if self._asked.sends_usage_always else None))

    def _chunk(self, choices: list[ChatChunkChoice], **usage: Any) -> ChatChunk:
        return ChatChunk(**self._frame, object="chat.completion.chunk", choices=choices, **usage)

    def _chunk_choice(self, answer: CompletionOutput) -> ChatChunkChoice:
        delta = Delta(content=answer.text)
        if answer.index not in self._begun:
            self._begun.add(answer.index)
            delta = Delta(role="assistant", content=answer.text)
        choice = ChatChunkChoice(
            index=answer.index,
            delta=delta,
            logprobs=self._logprobs(answer),
            finish_reason=_reason(answer),
        )
        if answer.finished:
            choice.stop_reason = answer.stop_reason
        if self._asked.return_token_ids:
            choice.token_ids = answer.token_ids
        return choice

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        reason = _reason(answer)
        assert reason is not None, "it is the whole answer"
        choice = ChatChoice(
            index=answer.index,
            message=ChatMessage(role="assistant", content=answer.text, refusal=None),
            logprobs=self._logprobs(answer),
            finish_reason=reason,
            stop_reason=answer.stop_reason,
        )
        if self._asked.return_token_ids:
            choice.token_ids = answer.token_ids
        return choice

    def _logprobs(self, answer: CompletionOutput) -> ChatLogprobs | None:
        if not self._asked.logprobs:
            return None
        return chat_logprobs(self._names, answer.token_ids, answer.logprobs or [], self._asked.top_logprobs or 0)


def _reason(answer: CompletionOutput) -> Literal["stop", "length"] | None:
    """`check_outcome` has seen to the others."""
    return cast(Literal["stop", "length"] | None, answer.finish_reason)
