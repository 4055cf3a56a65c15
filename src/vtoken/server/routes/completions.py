"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal, cast
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from vtoken.base.errors import VtokenError
from vtoken.engine.async_llm import RequestStream
from vtoken.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from vtoken.engine.prompts import Prompt
from vtoken.server.answers import Tally, finish_all, read_all, start_all
from vtoken.server.body import read_json
from vtoken.server.logprobs import CompletionScores, TokenNames, prompt_logprobs
from vtoken.server.openapi import takes
from vtoken.server.protocol.completion import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from vtoken.server.state import ServerState, state_of
from vtoken.server.streaming import DONE, EventStream, Template, event, until_disconnect

router = APIRouter(tags=["answers"])


@router.post("/v1/completions", **takes(CompletionRequest, CompletionResponse, streams=True))
async def create_completion(request: Request) -> Response:
    """Go on with one prompt or many."""
    state = state_of(request)
    asked = CompletionRequest.parse(await read_json(request, state))
    state.check_model(asked.model)
    state.check_ready()
    asked.check_together()
    try:
        completion = Completion(state, asked, asked.prompts(state.settings.max_prompts))
        if asked.stream:
            await until_disconnect(request, start_all(completion.streams))
            return EventStream(completion.events(), asked.renamed, asked.headers)
        outputs = await until_disconnect(request, finish_all(completion.streams))
    except VtokenError as error:
        raise state.explain(error, asked.renamed) from error
    content = completion.whole(outputs).model_dump_json(exclude_unset=True)
    return Response(content, media_type="application/json", headers=asked.headers)


class Completion:
    """One request of a client, and how its answer is told."""

    def __init__(self, state: ServerState, asked: CompletionRequest, prompts: list[Prompt]) -> None:
        params = asked.params()
        state.llm.check_together(len(prompts), params)
        kind: Literal["delta", "final"] = "delta" if asked.stream else "final"
        self.streams: list[RequestStream] = [
            state.llm.generate(prompt, params, output_kind=kind, cache_salt=asked.cache_salt) for prompt in prompts
        ]
        self._tokenizer = state.tokenizer
        self._asked = asked
        self._prompts = prompts
        self._names = TokenNames(state.tokenizer, asked.return_tokens_as_token_ids)
        self._tally = Tally(counts_answers=asked.num_new_tokens > 0)
        self._frame: dict[str, Any] = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
        }
        self._frame["model"] = asked.model
        # Whether a stream tells more of each token than its text.
        self._tells_more = asked.logprobs is not None or asked.return_token_ids or asked.sends_usage_always
        self._templates: dict[int, Template] = {}  # by index of a choice, once it has begun
        self._begun: dict[int, CompletionScores] = {}  # choices that have been told of, by index
        self._prompt_scores: dict[int, RequestOutput] = {}  # by prompt: an output that has them

    def whole(self, outputs: list[RequestOutput]) -> CompletionResponse:
        choices = []
        for place, output in enumerate(outputs):
            self._tally.add(place, output)
            for answer in output.outputs:
                choice = self._choice(place, output, answer)
                if self._asked.prompt_logprobs is not None:
                    choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
                choices.append(choice)
        return CompletionResponse(**self._frame, choices=choices, usage=self._tally.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(read_all(self.streams)) as news:
            async for place, output in news:
                self._tally.add(place, output)
                if output.prompt_logprobs is not None:
                    self._prompt_scores[place] = output
                for answer in output.outputs:
                    if self._is_worth_telling(answer):
                        yield self._event_of(place, output, answer)
        if self._asked.sends_usage:
            yield event(CompletionResponse(**self._frame, choices=[], usage=self._tally.usage()))
        yield DONE

    def _is_worth_telling(self, answer: CompletionOutput) -> bool:
        """Not inside a character, unless more than the text was asked for."""
        if self._asked.num_new_tokens == 0:
            return answer.finished
        return bool(answer.text) or answer.finished or (self._tells_more and bool(answer.token_ids))

    def _event_of(self, place: int, output: RequestOutput, answer: CompletionOutput) -> bytes:
        template = self._templates.get(place * self._asked.n + answer.index)
        if template is not None and not answer.finished:
            return template.fill(answer.text)
        choice = self._choice(place, self._prompt_scores.get(place, output), answer)
        if not (answer.finished or self._tells_more):  # from now on nothing changes but the text
            self._templates[choice.index] = Template(
                lambda text: self._event([choice.model_copy(update={"text": text})])
            )
        return self._event([choice])

    def _event(self, choices: list[CompletionChoice]) -> bytes:
        chunk = CompletionResponse(**self._frame, choices=choices)
        if self._asked.sends_usage:
            chunk.usage = self._tally.usage() if self._asked.sends_usage_always else None
        return event(chunk)

    def _choice(self, place: int, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice:
        """`output`: one that has the scores of the prompt, where they are asked for."""
        asked = self._asked
        index = place * asked.n + answer.index
        is_first = index not in self._begun
        scores = self._begun.setdefault(index, CompletionScores(self._names))
        text, token_ids = (answer.text, answer.token_ids) if asked.num_new_tokens else ("", [])
        logprobs = None
        if asked.logprobs is not None:
            logprobs = self._logprobs(scores, output, answer, token_ids, is_first)
        if asked.echo and is_first:
            text = self._prompt_text(place, output) + text
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=cast(Literal["stop", "length"] | None, answer.finish_reason),
            stop_reason=answer.stop_reason,
        )
        if asked.return_token_ids:
            choice.token_ids = token_ids
            if is_first:
                choice.prompt_token_ids = output.prompt_token_ids
        return choice

    def _logprobs(
        self,
        scores: CompletionScores,
        output: RequestOutput,
        answer: CompletionOutput,
        token_ids: list[int],
        is_first: bool,
    ) -> CompletionLogprobs:
        told: list[TokenLogprobs | None] = [*(answer.logprobs or [])[: len(token_ids)]]
        told_ids = token_ids
        if self._asked.echo and is_first:
            told_ids = output.prompt_token_ids + told_ids
            told = [*(output.prompt_logprobs or []), *told]
        return scores.of(told_ids, told)

    def _prompt_text(self, place: int, output: RequestOutput) -> str:
        prompt = self._prompts[place]
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else self._tokenizer.decode(output.prompt_token_ids)
