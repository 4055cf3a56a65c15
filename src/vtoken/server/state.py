"""`ServerState`: what all routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import HTTPConnection

from vtoken.base.errors import EngineError
from vtoken.engine.async_llm import AsyncLLM
from vtoken.engine.text import Tokenizer
from vtoken.server.errors import ApiError, as_api_error, unavailable
from vtoken.server.settings import ServerSettings


class ServerState:
    """One engine, the settings, and how many requests are being answered."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, model: str) -> None:
        """`model` is what clients may call the model, if the settings have no names for it."""
        self.llm = llm
        self.settings = settings
        self.names = settings.served_model_name or (model,)
        self.created = int(time.time())
        self.chat_template = settings.chat_template
        self.is_draining = False
        self.num_open = 0  # requests that take part in the shutdown: those that are answered from the engine
        self._idle = asyncio.Event()
        self._idle.set()
        self._listening: set[asyncio.Timeout] = set()  # of those who wait for a client's words

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.llm.engine.scheduler.config.max_model_len

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served here."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model: there is no {name[:200]!r} here; served: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    def check_ready(self) -> None:
        """Raise ApiError if nothing can be asked of the engine any more."""
        if not self.llm.is_alive:
            raise unavailable("the engine does not run any more")

    def explain(self, error: BaseException, renamed: Mapping[str, str] | None = None) -> ApiError:
        """See `as_api_error`; and a request that the shutdown has caught is not told of a failure."""
        if isinstance(error, EngineError) and self.is_draining:
            return unavailable("the server is shutting down")
        return as_api_error(error, renamed)

    def start_draining(self) -> None:
        """From now on nothing is taken; a request that is not here in full yet is none that is waited for."""
        self.is_draining = True
        for patience in self._listening:
            if not patience.expired():
                patience.reschedule(0)

    @asynccontextmanager
    async def patience(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """`asyncio.timeout` for what a client has still to send: it is over as soon as the server shuts down."""
        async with asyncio.timeout(0 if self.is_draining else seconds) as patience:
            self._listening.add(patience)
            try:
                yield patience
            finally:
                self._listening.discard(patience)

    def enter(self) -> None:
        self.num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()


def state_of(connection: HTTPConnection) -> ServerState:
    state: Any = connection.app.state.server
    assert isinstance(state, ServerState)
    return state
