"""Clients that stream answers over HTTP and keep what came, and when, for as little CPU time as Python can do it with.

The time is taken as bytes arrive; what they mean is worked out when all is over.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """`events`: (seconds of time.perf_counter, the decoded event), without the closing [DONE]."""

    sent: float
    events: list[tuple[float, dict[str, Any]]]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for _, event in self.events for choice in event["choices"])

    @property
    def token_times(self) -> list[float]:
        """When each event with text came."""
        return [at for at, event in self.events if event["choices"]]

    @property
    def num_tokens(self) -> int:
        """As the usage in the last event has it."""
        return int(self.events[-1][1]["usage"]["completion_tokens"])


class _Connection(asyncio.Protocol):
    """One client's connection, used again for each of its requests."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.marks: list[tuple[int, float]] = []  # (bytes there, when)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.marks.append((len(self.received), time.perf_counter()))
        if self.received.endswith(b"\r\n0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError(f"the server hung up after {bytes(self.received)!r}"))

    async def ask(self, head: bytes, body: bytes) -> tuple[float, bytes, list[tuple[int, float]]]:
        """(when it was sent, what came, when)"""
        assert self._transport is not None
        self.received, self.marks = bytearray(), []
        self.ended = asyncio.get_running_loop().create_future()
        sent = time.perf_counter()
        self._transport.write(head + body)
        await self.ended
        return sent, bytes(self.received), self.marks

    def close(self) -> None:
        self.ended.cancel()
        if self._transport is not None:
            self._transport.close()


async def stream_all(
    port: int, path: str, bodies: Sequence[dict[str, Any]], num_clients: int
) -> tuple[float, list[Answer]]:
    """Send all, in order, `num_clients` at a time. (seconds from the first byte out to the last one in, the answers)"""
    raw: list[tuple[float, bytes, list[tuple[int, float]]]] = [(0.0, b"", [])] * len(bodies)
    encoded = [json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}) for body in bodies]
    queue = iter(range(len(bodies)))
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(_Connection, "127.0.0.1", port))[1] for _ in range(min(num_clients, len(bodies)))
    ]

    async def work(connection: _Connection) -> None:
        for index in queue:
            body = encoded[index].encode()
            head = (
                f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            raw[index] = await connection.ask(head.encode(), body)
        connection.close()

    started = time.perf_counter()
    await asyncio.gather(*map(work, connections))
    seconds = time.perf_counter() - started
    return seconds, [_decode(*each) for each in raw]


def _decode(sent: float, received: bytes, marks: list[tuple[int, float]]) -> Answer:
    head, _, _ = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise ValueError(f"the server answered {received[:500]!r}")
    ends = [end for end, _ in marks]
    text, arrived = b"", []  # of each byte of the text up to an end, when it was there: (end, when)
    place = len(head) + 4
    while True:
        line_end = received.index(b"\r\n", place)
        size = int(received[place:line_end], 16)
        if size == 0:
            break
        begin = line_end + 2
        text += received[begin : begin + size]
        arrived.append((len(text), marks[bisect.bisect_left(ends, begin + size)][1]))
        place = begin + size + 2
    text_ends = [end for end, _ in arrived]
    events, place = [], 0
    while place < len(text):
        end = text.index(b"\n\n", place) + 2
        at = arrived[bisect.bisect_left(text_ends, end)][1]
        data = text[place:end].removeprefix(b"data: ").strip()
        if data != b"[DONE]":
            events.append((at, json.loads(data)))
        place = end
    return Answer(sent, events)
