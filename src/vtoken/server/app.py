"""`create_app`: the server as an ASGI application."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import vtoken
from vtoken.engine.async_llm import AsyncLLM
from vtoken.server.dashboard import dashboard_router
from vtoken.server.errors import ApiError, as_api_error
from vtoken.server.metrics import Metrics, metrics_router
from vtoken.server.middleware import Gate
from vtoken.server.openapi import describe_requests
from vtoken.server.routes import chat, completions, health, models, tokens
from vtoken.server.settings import ServerSettings
from vtoken.server.state import ServerState
from vtoken.server.tracing import RequestTracer, otlp_provider

logger = logging.getLogger("vtoken.server")

_ABOUT = "OpenAI's API over a paged KV cache in which an evicted token's memory comes back."


def create_app(llm: AsyncLLM, settings: ServerSettings | None = None, *, model: str = "") -> FastAPI:
    """The application around an engine, which stays the caller's to close.

    `model` is what clients may call the model where the settings have no names for it.
    """
    settings = settings or ServerSettings()
    state = ServerState(llm, settings, model or "model")
    app = FastAPI(title="vtoken", version=vtoken.__version__, description=_ABOUT)
    app.state.server = state
    for routes in (completions, chat, models, tokens, health):
        app.include_router(routes.router)
    metrics = Metrics(llm, settings.metrics_prefix, model_name=state.names[0])
    app.include_router(metrics_router(metrics))
    if settings.otlp_traces_endpoint is not None:
        llm.add_step_listener(RequestTracer(otlp_provider(settings.otlp_traces_endpoint), state.names[0]))
    if settings.dashboard:
        app.include_router(dashboard_router(llm, title=state.names[0]))
    describe_requests(app, settings.root_path)
    app.add_exception_handler(HTTPException, _of_the_framework)
    app.add_exception_handler(RequestValidationError, _of_a_parameter)
    app.add_middleware(Gate, state=state)
    if settings.allowed_origins:  # outermost, so that errors can be read from a page too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    tokenizer = state.tokenizer
    if tokenizer is not None and state.chat_template is None and not tokenizer.has_chat_template:
        logger.warning(
            "this model has no chat template, so /v1/chat/completions refuses everything; give one with --chat-template"
        )
    return app


async def _of_the_framework(request: Request, error: Exception) -> Response:
    """No such route, or no such method."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path[:200]} here; /docs lists what there is",
        405: f"{request.method} is not for {request.url.path[:200]}",
    }.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


async def _of_a_parameter(request: Request, error: Exception) -> Response:
    return as_api_error(ApiError(400, "a parameter in the address is wrong")).response()
