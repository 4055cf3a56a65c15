"""`POST /tokenize`, `POST /detokenize`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vtoken.base.errors import RequestError
from vtoken.base.validation import shorten
from vtoken.engine.text import Tokenizer
from vtoken.server.body import read_json
from vtoken.server.openapi import takes
from vtoken.server.protocol.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from vtoken.server.state import state_of

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", **takes(TokenizeRequest, TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """Text, or a conversation, to token ids."""
    state = state_of(request)
    asked = TokenizeRequest.parse(await read_json(request, state))
    state.check_model(asked.model)
    asked.check_together()

    def work(tokenizer: Tokenizer) -> TokenizeResponse:
        if asked.messages is None:
            assert asked.prompt is not None
            tokens = tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens) if asked.prompt else []
        else:
            tokens = tokenizer.encode_chat(
                asked.messages,
                tools=asked.tools,
                chat_template=state.chat_template,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                chat_template_kwargs=asked.chat_template_kwargs,
            )
        found = TokenizeResponse(count=len(tokens), max_model_len=state.max_model_len, tokens=tokens)
        if asked.return_token_strs:
            found.token_strs = [tokenizer.token_text(token) for token in tokens]
        return found

    found = await state.llm.with_tokenizer(work)
    return Response(found.model_dump_json(exclude_unset=True), media_type="application/json")


@router.post("/detokenize", **takes(DetokenizeRequest, DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """Token ids to text."""
    state = state_of(request)
    asked = DetokenizeRequest.parse(await read_json(request, state))
    state.check_model(asked.model)
    vocab_size = state.llm.engine.facts.vocab_size

    def work(tokenizer: Tokenizer) -> str:
        tokens = asked.tokens
        if not isinstance(tokens, list):
            raise RequestError(f"tokens: expected a list of token ids, got {shorten(tokens)}", "tokens")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                message = f"tokens: expected whole numbers from 0 to {vocab_size - 1}, got {shorten(token)}"
                raise RequestError(message, "tokens")
        return tokenizer.decode_raw([token for token in tokens if tokenizer.is_known(token)])

    found = DetokenizeResponse(prompt=await state.llm.with_tokenizer(work))
    return Response(found.model_dump_json(), media_type="application/json")
