"""Open files, of which each connection is one: as many as the system allows, and few words where that is not enough."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

logger = logging.getLogger("vtoken.server")

_MOST = 65_536
_PAUSE = 10.0  # seconds between two lines


def raise_limit() -> None:
    """Up to the hard limit or `_MOST`: the soft one is often 1,024. Where that cannot be, it stays as it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # macOS has a further limit, and containers may forbid it
            logger.debug("the limit of open files stays at %d: %s", soft, error)


class AcceptErrors:
    """An exception handler for event loops. That no connection can be accepted is told in one line now and then:
    asyncio reports it thousands of times a second, each with a traceback. All else goes the usual way."""

    def __init__(self) -> None:
        self._quiet_until = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and context.get("message", "").startswith("socket.accept()")):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + _PAUSE
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "no connection can be accepted: %s; it is tried again each second (%d files may be open, ulimit -n)",
                error.strerror,
                soft,
            )
