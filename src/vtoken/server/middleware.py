"""What stands before every route: who may come in, and that whatever happens is answered in OpenAI's words."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vtoken.server.errors import ApiError, as_api_error, unavailable
from vtoken.server.state import ServerState

# Everything else needs a key where there are keys, also what other modules add.
OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/dashboard", "/dashboard/"})  # of it only the page, without data
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_METHODS = "GET, HEAD, POST, OPTIONS"


class Gate:
    """Keys, HEAD and OPTIONS, request ids, and the last catch for errors."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._open_paths = OPEN_PATHS if state.settings.metrics_need_key else OPEN_PATHS | {"/metrics"}
        self._keys = _digests(state.settings.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":  # no route takes one
            await send({"type": "websocket.close"})
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._pass(scope, headers, receive, send_with_id)
        except ClientDisconnect:
            if not has_begun:
                await Response(status_code=499)(scope, receive, send_with_id)  # for the log; nobody reads it
        except Exception as error:
            if has_begun:
                raise
            await as_api_error(error).response()(scope, receive, send_with_id)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        root = self._state.settings.root_path
        scope = {**scope, "root_path": root}
        method, path = scope["method"], path_of(scope["path"], root)
        if method == "OPTIONS":
            await Response(status_code=204, headers={"Allow": _METHODS})(scope, receive, send)
            return
        if path not in self._open_paths:
            self._check_key(headers)
        if method == "HEAD":  # the body of the answer is left out by whoever writes it
            scope = {**scope, "method": "GET"}
        if method != "POST":
            await self._app(scope, receive, send)
            return
        if self._state.is_draining:
            raise unavailable("the server is shutting down")
        self._state.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.leave()

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # What a header holds are bytes: nearly all clients write a key in UTF-8, some in Latin-1.
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest() if scheme.lower() == "bearer" else b""
        # All are compared, and each in the same time, so that the answer's time tells nothing.
        fits = [hmac.compare_digest(digest, known) for known in self._keys]
        if not any(fits):
            raise ApiError(
                401,
                "a valid API key is needed, as the header 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def path_of(path: str, root: str) -> str:
    """The path within the application, whether or not a proxy has cut the root path off."""
    return path.removeprefix(root) if root and path.startswith(root + "/") else path


def _digests(keys: Sequence[str]) -> list[bytes]:
    """Of one length, so that comparing them tells nothing about the lengths of keys. A key that is spelled differently
    in UTF-8 and Latin-1 has one for each."""
    spelled = [key.encode(errors="surrogateescape") for key in keys]
    spelled += [key.encode("latin-1") for key in keys if not key.isascii() and max(key) <= "\xff"]
    return [hashlib.sha256(key).digest() for key in spelled]
