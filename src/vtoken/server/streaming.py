"""Server-sent events: how they look, and that nobody goes on for a client who has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vtoken.server.errors import as_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


# Line ends to clients that split lines as Unicode does, as httpx and Python's str do. JSON need not escape them.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_MARK = "\0"
_json_of = json.JSONEncoder(ensure_ascii=False).encode


def event(model: BaseModel) -> bytes:
    """Fields that were never set are left out."""
    return b"data: " + _in_one_line(model.model_dump_json(exclude_unset=True)) + b"\n\n"


def _in_one_line(encoded: str) -> bytes:
    """`encoded`: JSON without line breaks, so that what else may end a line is within its texts."""
    if not encoded.isascii():
        for sign, escaped in _LINE_ENDS.items():
            encoded = encoded.replace(sign, escaped)
    return encoded.encode()


class Template:
    """An event of which nothing changes but a text, which comes after all other texts that are not ours: encoded once,
    then filled in. To build and encode a model for each token costs several times as much."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make`: the event with a text."""
        self._before, _, self._after = make(_MARK).rpartition(_json_of(_MARK).encode())

    def fill(self, text: str) -> bytes:
        return self._before + _in_one_line(_json_of(text)) + self._after


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """`await work`, unless the client goes away meanwhile: then it is cancelled. The body must have been read.

    Raises ClientDisconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientDisconnect
    finally:
        await _cancel(leaving)
        await _cancel(working)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel, and wait until what it held is let go of."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))


class EventStream(Response):
    """Sends events as they come. An error in between becomes the last event. A client who leaves ends `events`, also
    where nothing is there to be sent and so no sending fails."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], renamed: Mapping[str, str], headers: Mapping[str, str]
    ) -> None:
        """`renamed`: see `as_api_error`."""
        # Proxies such as nginx would otherwise keep events back until there are enough of them.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._renamed = renamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            await _cancel(leaving)
            await _cancel(sending)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for part in self._events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except OSError:  # the client has gone
            return
        except Exception as error:
            last = b"data: " + json.dumps(as_api_error(error, self._renamed).body()).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
