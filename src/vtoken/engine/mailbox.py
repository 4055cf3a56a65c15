"""`Mailbox`: hands the outputs of one request from the engine's thread to the event loop that reads them."""

from __future__ import annotations

import asyncio
from threading import Lock

from vtoken.base.errors import VtokenError
from vtoken.engine.outputs import RequestOutput, join_deltas
from vtoken.engine.tracked import OutputKind
from vtoken.schedule.sequence import Request

_MOST_UNREAD = 64  # deltas that are kept apart while nobody reads; then they become one
_SLIGHTLY_LATE = 8  # deltas, of which a reader gets each; one who is later is helped to catch up


class Mailbox:
    """Outputs of one request that were not read yet.

    Putting never waits and what is unread never grows beyond the answer itself: cumulative outputs replace each other,
    deltas become one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: OutputKind) -> None:
        self.loop = loop
        self.request: Request | None = None  # once the engine has it; for the engine's thread
        self.is_abort_asked = False  # perhaps before the engine has it
        self._kind = kind
        self._lock = Lock()
        self._unread: list[RequestOutput] = []
        self._error: VtokenError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the one reader, in its loop

    def put(self, output: RequestOutput) -> bool:
        """Leave an output. Returns whether the reader has to be woken: he may be waiting."""
        with self._lock:
            was_empty = not self._unread
            if self._kind == "delta":
                if len(self._unread) >= _MOST_UNREAD:
                    self._unread = [join_deltas(self._unread)]
                self._unread.append(output)
            else:
                self._unread = [output]
            return was_empty

    def fail(self, error: VtokenError) -> None:
        """Nothing more will come: the reader gets `error` after what is there already."""
        with self._lock:
            self._error = error

    def wake(self) -> None:
        """In the reader's loop: let him look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """The next output; of a delta all that came since the last, if they are many. Raises what the mailbox failed
        with."""
        if self._waiter is not None:
            raise RuntimeError("two tasks read one stream; give each a request of its own")
        while True:
            with self._lock:
                if self._unread:
                    taken = 1 if len(self._unread) <= _SLIGHTLY_LATE else len(self._unread)
                    output = join_deltas(self._unread[:taken])
                    del self._unread[:taken]
                    return output
                if self._error is not None:
                    raise self._error
            # Whoever puts something in now wakes us by a callback, and those run only once we wait.
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
