"""Clients that take their time, or offer another protocol: what a connection makes of what comes over it."""

from __future__ import annotations

import json
import select
import socket
import time
from http.client import HTTPResponse

import pytest

from tests.server.serving import MODEL, Served
from vtoken.server.connection import Connection

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtoken.server.connection.PATIENCE", 0.3)


def connect(server: Served) -> socket.socket:
    connection = socket.create_connection(server.http.base_url.netloc.decode().split(":"))
    connection.settimeout(20)
    return connection


def status(connection: socket.socket) -> int:
    """Of the next answer, which is read to its end."""
    with HTTPResponse(connection) as answer:
        answer.begin()
        answer.read()
        return answer.status


def rest(connection: socket.socket) -> bytes:
    """Whatever comes until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def dribble(connection: socket.socket, sign: bytes) -> None:
    """Send it again and again, until the server has closed the connection or answers."""
    for _ in range(1000):
        if select.select([connection], [], [], 0.02)[0]:
            return
        connection.sendall(sign)
    raise AssertionError("the server listens to everything")


def test_a_head_that_stops(server):
    with connect(server) as connection:
        connection.sendall(HEAD)
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert answer.endswith(b"the rest of the request's head did not come in time")


def test_a_connection_without_a_word(server):
    """Closed, and nothing is said: a browser that connected in advance would take it for an answer."""
    with connect(server) as connection:
        assert rest(connection) == b""


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("begin", "sign"), [(HEAD, b"x"), (b"", b"\r\n"), (b"G", b"E")], ids=["head", "ends", "method"]
)
def test_a_head_that_dribbles(server, is_first, begin, sign):
    """Each byte is in time, and the whole is not."""
    with connect(server) as connection:
        if not is_first:
            connection.sendall(HEAD + b"\r\n\r\n")
            assert status(connection) == 200
        connection.sendall(begin)
        dribble(connection, sign)


def test_a_whole_head_in_pieces(server):
    with connect(server) as connection:
        for part in (HEAD, b"no", b"\r\n", b"\r\n"):
            connection.sendall(part)
        assert status(connection) == 200


@pytest.mark.parametrize("behind", [b"", HEAD])
def test_an_answer_takes_as_long_as_it_takes(server, behind):
    """Also where the next request was begun on the same connection."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    with connect(server) as connection:
        connection.sendall(
            head % len(content) + (b"" if behind else b"Connection: close\r\n") + b"\r\n" + content + behind
        )
        answer = rest(connection)
    assert b"data: [DONE]" in answer
    assert (b"HTTP/1.1 408" in answer) == bool(behind)


def test_a_body_that_nobody_waits_for(server):
    """It was answered before it came; the connection is good for another request."""
    with connect(server) as connection:
        head = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
        connection.sendall(head)
        assert status(connection) == 404
        connection.sendall(b"body")
        connection.sendall(HEAD + b"\r\n\r\n")
        assert status(connection) == 200


def offering(upgrade: bytes, body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\n"
    return head % upgrade + b"HTTP2-Settings: AAMAAABkAAQ\r\nContent-Length: %d\r\n\r\n" % len(body)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.0"])
@pytest.mark.parametrize("cut", [0, 20, 120, -1, None])
def test_who_offers_another_protocol_is_answered_in_this_one(server, upgrade, cut):
    """Java's client does with every request. Two of them over one connection, each in one piece or two."""
    body = json.dumps({"model": MODEL, "prompt": "upgrade: x\r\nupgrade: y", "max_tokens": 2}).encode()
    sent = offering(upgrade, body) + body
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(sent[:cut])
            if cut is not None:
                time.sleep(0.05)
                connection.sendall(sent[cut:])
            assert status(connection) == 200


@pytest.mark.parametrize("length", [78, 83])
def test_a_body_is_never_taken_for_a_request(server, length):
    """Also where the offer was not seen, since the name of its field came in two parts."""
    body = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    head = offering(b"h2c", body)
    assert head[:length].endswith((b"\r\nU", b"\r\nUpgrad"))
    with connect(server) as connection:
        connection.sendall(head[:length])
        time.sleep(0.05)
        connection.sendall(head[length:])
        time.sleep(0.05)
        try:
            connection.sendall(body)
            answered = rest(connection)
        except ConnectionError:
            answered = b""
    assert b"version" not in answered


def test_a_body_that_comes_after_its_answer_keeps_no_connection_open(server, monkeypatch):
    """uvicorn stops its clock for pauses at any byte."""
    made = Connection.connection_made

    def hurried(self, transport):
        made(self, transport)
        self.timeout_keep_alive = 0.5

    monkeypatch.setattr(Connection, "connection_made", hurried)
    with connect(server) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        assert status(connection) == 404
        connection.sendall(b"body")
        assert rest(connection) == b""  # it is closed
