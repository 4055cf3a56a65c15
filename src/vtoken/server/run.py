"""Run the application: take the port before the model is loaded, and end gently when told to."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from vtoken.base.errors import ConfigError
from vtoken.engine.advice import advise
from vtoken.server.connection import Connection
from vtoken.server.open_files import AcceptErrors, raise_limit
from vtoken.server.settings import ServerSettings
from vtoken.server.state import ServerState

logger = logging.getLogger("vtoken.server")

_LAST_WORDS = 5.0  # seconds in which streams that were ended get their error, and the engine its end


def take_port(settings: ServerSettings) -> socket.socket:
    """Bind, but do not listen yet: a port in use is heard of before the weights are loaded, and nobody connects to a
    server that is not there yet. Raises ConfigError."""
    where = f"host={settings.host}, port={settings.port}"
    try:
        [family, kind, protocol, _, address], *_ = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{where}: there is no such address: {getattr(error, 'strerror', error)}") from None
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where}: the port is in use; give another one, or 0 for any that is free") from None
        raise ConfigError(f"{where}: cannot listen there: {error.strerror}") from None
    return taken


def url_of(taken: socket.socket, settings: ServerSettings) -> str:
    scheme = "https" if settings.ssl_certfile else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{taken.getsockname()[1]}{settings.root_path}"


def run(app: FastAPI, taken: socket.socket, on_listening: Callable[[], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; `on_listening` is called once clients can connect.

    Then new requests are refused (503), also those of which the body is still to come; running ones get
    `drain_timeout` seconds to end, and what runs still is ended with an error. A second signal ends it at once.
    """
    state: ServerState = app.state.server
    settings = state.settings
    config = uvicorn.Config(
        app,
        http=Connection,
        log_level=settings.log_level,
        timeout_keep_alive=int(settings.keep_alive_timeout),
        timeout_graceful_shutdown=int(_LAST_WORDS),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        server_header=False,
    )
    logging.getLogger("uvicorn.access").addFilter(_is_worth_a_line)
    raise_limit()
    asyncio.run(_serve(_Server(config, on_listening), state, taken))


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """An open dashboard asks for its data all the time; only where it asked in vain is that told."""
    if not isinstance(record.args, tuple) or len(record.args) != 5:  # client, method, path, HTTP version, status
        return True
    path, status = str(record.args[2]), record.args[4]
    return "/dashboard/" not in path or status != 200


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn knows no draining, and would end by the signal rather than with exit code 0."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_listening is not None:
            self._on_listening()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: uvicorn.Server, state: ServerState, taken: socket.socket) -> None:
    told_to_stop, told_again = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (told_again if told_to_stop.is_set() else told_to_stop).set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[taken]))
    await _first_of(serving, told_to_stop.wait())
    if not serving.done():
        state.start_draining()
        timeout = state.settings.drain_timeout
        logger.info(
            "shutting down: %d requests get %g seconds to end; a second signal ends them now", state.num_open, timeout
        )
        await _first_of(state.idle(), told_again.wait(), timeout=timeout)
        await _close(state)
        server.should_exit = True
    await serving


async def _close(state: ServerState) -> None:
    """End what runs still; its readers are told. A step that hangs cannot be ended but with the process."""
    closing = asyncio.ensure_future(state.llm.aclose())
    await asyncio.wait((closing,), timeout=_LAST_WORDS)
    if not closing.done():
        logger.critical("the engine hangs in a step; ending without it")
        os._exit(1)
    closing.result()
    for advice in advise(state.llm.engine.stats()):
        logger.info("advice: %s", advice)


async def _first_of(*awaited: Coroutine[Any, Any, Any] | asyncio.Task[Any], timeout: float | None = None) -> None:
    """Until one has ended, or the time is over. Coroutines that have not ended are cancelled, tasks go on."""
    tasks = [each if isinstance(each, asyncio.Task) else asyncio.ensure_future(each) for each in awaited]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task, each in zip(tasks, awaited, strict=True):
        if task is not each:
            task.cancel()
