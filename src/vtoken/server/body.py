"""The body of a request: read up to a limit, then JSON as the standard has it, or an error that says what is wrong."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from vtoken.base.units import format_bytes
from vtoken.server.errors import ApiError, unavailable
from vtoken.server.state import ServerState, state_of

_SMALL = 1 << 16  # bytes that are decoded faster than a thread is woken
_LINGER = 10.0  # seconds
PATIENCE = 60.0  # seconds without a byte of a body that was announced
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # UTF-8 itself can hold none
# Texts, lists and objects of one body. Decoding is one call that lets nobody else run, and takes a second for a few
# millions of them; a vocabulary's names (2**18), the most that a field may have, still fit.
_MAX_MEMBERS = 400_000
# A text goes on to the end of the body if it is never closed, so that each byte is looked at once.
_MEMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]', re.DOTALL)


class TooLarge(ApiError):
    """A body beyond the limit. The answer is sent at once; what the client still sends is read and dropped for a
    while, since a connection that is cut under a client's hands loses the answer too."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the body is larger than {format_bytes(limit)} (max_body_size)", code="body_too_large")

    def response(self) -> _Lingering:
        return _Lingering(self.body(), self.status, {"Connection": "close"})


class _Lingering(JSONResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with state_of(HTTPConnection(scope)).patience(_LINGER):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_json(request: Request, state: ServerState) -> Any:
    """The decoded body. Raises ApiError: 415 for another type or a compressed body, 408 if it stops, 503 if the server
    shuts down before it is here, 413 beyond `max_body_size` or with too much in it, 400 for what is no JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"expected a body of type application/json, got {kind[:80]!r}", code="unsupported_type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"expected a body that is not compressed, got {coding[:80]!r}", code="unsupported_type")
    body = await _read(request, state)
    return decode(body) if len(body) <= _SMALL else await asyncio.to_thread(decode, body)


async def _read(request: Request, state: ServerState) -> bytes:
    limit = state.settings.max_body_size
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise TooLarge(limit)
    parts, size = [], 0
    try:
        async with state.patience(PATIENCE) as patience:
            async for part in request.stream():
                if not state.is_draining:
                    patience.reschedule(asyncio.get_running_loop().time() + PATIENCE)
                size += len(part)
                if size > limit:
                    raise TooLarge(limit)
                parts.append(part)
    except TimeoutError:
        if state.is_draining:
            raise unavailable("the server is shutting down") from None
        message = f"the rest of the body did not come within {PATIENCE:g} seconds"
        raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
    return b"".join(parts)


def decode(body: bytes) -> Any:
    """JSON to Python. Refuses NaN and infinity, which are no JSON, and text that is no Unicode. Of a name that comes
    twice the last value counts."""
    _check_size(body)
    try:
        found = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is no UTF-8") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise _invalid("a number has too many digits") from None
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    if _SURROGATE.search(body):
        _check_text(found)
    return found


def _check_size(body: bytes) -> None:
    """Signs within texts are no members, so they are told apart where there are many of them."""
    if body.count(b'"') // 2 + body.count(b"[") + body.count(b"{") <= _MAX_MEMBERS:
        return
    for count, _ in enumerate(_MEMBER.finditer(body), 1):
        if count > _MAX_MEMBERS:
            raise ApiError(
                413, f"the body has more than {_MAX_MEMBERS:,} texts, lists and objects in it", code="body_too_large"
            )


def _check_text(found: Any) -> None:
    for field, value in found.items() if isinstance(found, dict) else [(None, found)]:
        try:
            json.dumps([field, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            name = field if field is not None and field.isprintable() else None
            raise ApiError(
                400, f"{name or 'the body'}: holds half a surrogate pair, which is no text", param=name
            ) from None
        except RecursionError:
            raise _invalid("it is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is no valid JSON: {name} is no number there", code="invalid_json")


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the body is no valid JSON: {why}", code="invalid_json")
