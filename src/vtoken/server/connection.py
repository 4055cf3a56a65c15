"""One connection: uvicorn's protocol, and that nobody may take for ever to say what he wants, nor offer another
protocol, to which httptools would give the rest of the connection."""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vtoken.server.body import PATIENCE

# Many clients offer HTTP/2 with each request (Java's, `curl --http2`), and expect to be answered as if they had not.
_OFFER = re.compile(rb"^upgrade(?=[ \t]*:)", re.IGNORECASE | re.MULTILINE)
_TOO_SLOW = b"the rest of the request's head did not come in time"


class Connection(HttpToolsProtocol):
    """Closed where the head of a request is not there `PATIENCE` seconds after the connection was made, or after the
    first byte of a later one, for which uvicorn waits for ever. Bodies that stop, and pauses between requests, have
    their limits elsewhere."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        # Not by `on_message_begin` alone, which is not told of line ends in front of a request; they end a pause, too.
        if self._is_idle:
            self._wait()
            # It may reach into a body if a part ends just before the last line end of a head; no JSON begins so.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _OFFER.sub(b"x-offer", head) + end + rest
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """An offer that was not seen above, since it came in two parts or behind another request. What follows would be
        taken for the next request, though it may be the body of this one."""
        if self.pipeline:
            self.transport.close()
        else:
            self.send_400_response("No other protocol than HTTP/1.1 is spoken here.")

    def on_message_begin(self) -> None:
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_waiting()  # for a body that nobody read
        super().on_message_complete()
        if self._is_idle and not self.transport.is_closing():  # the pause, which uvicorn ends at any byte, goes on
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(PATIENCE, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self._is_idle:
            self._wait()  # what was asked for before is still being answered here
        elif not self.transport.is_closing():
            if self.scope is not None:  # else not a byte has come: browsers connect in advance
                head = (
                    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                )
                self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(_TOO_SLOW), _TOO_SLOW))
            self.transport.close()
