"""What a client is told when something is wrong: OpenAI's error object, in the user's words and nobody else's.

Messages never hold the name of a class, a path or a traceback; those go to the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from starlette.responses import JSONResponse, Response

from vtoken.base.errors import EngineError, QueueFullError, RequestError, VtokenError, describe
from vtoken.engine.outputs import RequestOutput

logger = logging.getLogger("vtoken.server")

RETRY_AFTER = "1"  # seconds; a queue moves with every step
INVALID, OVERLOADED, BROKEN = "invalid_request_error", "overloaded_error", "server_error"
_RULED_OUT = re.compile(r"(\w+).* ruled out every token: ")  # see `RequestRules.ruling_out`
_LONGEST_MESSAGE = 2000  # characters: a template may raise with a whole conversation


class ApiError(Exception):
    """An answer that is an error. `param` is the field at fault, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        message = self.message
        if len(message) > _LONGEST_MESSAGE:
            message = message[:_LONGEST_MESSAGE] + "…"
        message = message.encode(errors="replace").decode()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, self.headers)


def as_api_error(error: BaseException, renamed: Mapping[str, str] | None = None) -> ApiError:
    """What to tell the client of any error. `renamed`: fields of the engine -> what this route calls them."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), kind=OVERLOADED, code="queue_full", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, RequestError):
        return _refused(error, renamed or {})
    if isinstance(error, VtokenError):
        logger.error("a request failed: %s", describe(error), exc_info=not isinstance(error, EngineError))
    else:
        logger.exception("a request failed", exc_info=error)
    return failed()


def _refused(error: RequestError, renamed: Mapping[str, str]) -> ApiError:
    message, field = str(error), error.field
    for old, new in renamed.items():
        # A name of one word is a field where a message begins with it; elsewhere it is a word, and may be the client's.
        place = rf"(?<!\w){old}(?!\w)" if "_" in old else rf"^{old}(?=:)"
        message = re.sub(place, new, message)
    return ApiError(400, message, param=field if field is None else renamed.get(field, field))


def failed() -> ApiError:
    """The fault is ours, and the log has it."""
    return ApiError(500, "the server failed on this request; its log says why", kind=BROKEN, code="internal_error")


def unavailable(why: str) -> ApiError:
    return ApiError(503, why, kind=OVERLOADED, code="unavailable", headers={"Retry-After": RETRY_AFTER})


def check_outcome(output: RequestOutput) -> None:
    """Raise RequestError if a request's form cost too much, or its rules left it no token; ApiError if it failed in a
    step, or was aborted by somebody else than its client."""
    for choice in output.outputs:
        if choice.error is not None and (rules := _RULED_OUT.match(choice.error)):
            raise RequestError(choice.error, rules[1])
        if choice.error is not None and choice.error.startswith("structured_outputs:"):
            # What a form costs is known only where its text leads: a limit on that is the request's, not our fault.
            raise RequestError(choice.error, "structured_outputs")
        if choice.finish_reason == "error":
            logger.error("request %s failed: %s", output.request_id, choice.error)
            raise failed()
        if choice.finish_reason == "abort":
            raise unavailable("the server ended this request before it was answered, for it shuts down")
        if choice.error is not None:
            logger.error("request %s: %s", output.request_id, choice.error)
            raise failed()
