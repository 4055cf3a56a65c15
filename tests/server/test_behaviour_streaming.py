"""Rows of the list of known faults that concern streams."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest

from tests.server.serving import MODEL, error_of, events_of, until

TEXT = "🏳️‍🌈 Žď 你好 e\u0301 नमस्ते"
ROUTES = ("/v1/completions", "/v1/chat/completions")
BODY = {"model": MODEL, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}


def text_of(event) -> str:
    choice = event["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"]["content"]


@pytest.mark.parametrize("route", ROUTES)
def test_u09_u86_no_broken_characters(server, route):
    """Every token is a byte: no U+FFFD in any delta, nothing twice, and the join is the text."""
    body = {**BODY, "structured_outputs": {"choice": [TEXT]}, "max_tokens": 100}
    pieces = [text_of(event) for event in server.stream(route, body)[:-1]]
    assert "".join(pieces) == TEXT
    assert "�" not in "".join(pieces)
    cut = server.stream(route, {**body, "max_tokens": 6})[:-1]  # inside the flag's joiner
    joined = "".join(map(text_of, cut))
    assert joined.rstrip("�") == TEXT[:1]
    assert "�" not in "".join(map(text_of, cut[:-1]))


@pytest.mark.parametrize("route", ROUTES)
def test_u15_stop_texts(server, route):
    """Text before the stop is exact, nothing of it leaks, and usage counts real tokens."""
    body = {**BODY, "structured_outputs": {"choice": ["one two STOP three"]}, "max_tokens": 100}
    for stop, expected, used in (
        ("STOP", "one two ", 12),
        (["STOPS", "thr"], "one two STOP ", 16),
        (["xyz"], None, 18),
    ):
        events = server.stream(route, {**body, "stop": stop, "stream_options": {"include_usage": True}})[:-1]
        *parts, last = events
        told = "".join(map(text_of, parts))
        assert told == (expected or "one two STOP three")
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"
        assert parts[-1]["choices"][0]["stop_reason"] == (
            None if expected is None else stop if isinstance(stop, str) else "thr"
        )
        assert last["usage"]["completion_tokens"] in (used, used + 1)  # the token that ends it


@pytest.mark.parametrize("route", ROUTES)
def test_u50_usage(server, route):
    """Only on demand: null in every event, then one with no choices before [DONE]."""
    body = {**BODY, "max_tokens": 5, "ignore_eos": True}
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        assert all("usage" not in event for event in server.stream(route, body | options)[:-1])
    *parts, last, done = server.stream(route, {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert all(part["usage"] is None for part in parts)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last, done = server.stream(route, {**body, "stream_options": options})
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize("route", ROUTES)
def test_u41_an_error_after_the_stream_began(server, route, monkeypatch, caplog):
    """One event with the error, no class names, then the end; other streams go on."""
    engine = server.llm.engine
    execute, steps = engine.executor.execute, []

    def failing(plan):
        if 90 in plan.token_ids.tolist():  # Z, which only the bad one draws
            steps.append(plan)
            if len(steps) > 5:
                raise RuntimeError("a secret in /etc/passwd")
        return execute(plan)

    monkeypatch.setattr(engine.executor, "execute", failing)
    fine = {}

    def ask() -> dict:
        return server.complete(prompt="x", max_tokens=200, ignore_eos=True, logit_bias={"90": -100})

    other = threading.Thread(target=lambda: fine.update(text=ask()))
    other.start()
    body = {**BODY, "stream": True, "logit_bias": {"90": 100}, "temperature": 0, "max_tokens": 50}
    response = server.http.post(route, json=body)
    *parts, last = events_of(response.text)
    assert parts
    assert "".join(map(text_of, parts)) == "Z" * len("".join(map(text_of, parts)))
    assert last == {
        "error": {
            "message": "the server failed on this request; its log says why",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert "secret" in caplog.text
    other.join()
    assert fine["text"]["usage"]["completion_tokens"] == 200
    whole = server.http.post(route, json={**body, "stream": False})
    error_of(whole, 500)
    monkeypatch.setattr(engine.executor, "execute", execute)
    assert server.complete(prompt="x", max_tokens=1)


def test_u70_one_event_for_a_token(server, monkeypatch):
    """Where steps take longer than to tell of them, events come one by one, each with text, as they are made."""
    execute = server.llm.engine.executor.execute
    monkeypatch.setattr(server.llm.engine.executor, "execute", lambda plan: time.sleep(0.02) or execute(plan))
    times = []
    body = {**BODY, "logit_bias": {"65": 100}, "temperature": 0, "max_tokens": 20, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                times.append(time.monotonic())
                assert '"content":"A"' in line
    assert len(times) == 20
    gaps = sorted(b - a for a, b in pairwise(times))
    assert gaps[len(gaps) // 2] > 0.01


def test_headers_of_a_stream(server):
    with server.http.stream("POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 1}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        response.read()


def test_a_slow_client_misses_nothing(server):
    """What it does not take is joined meanwhile."""
    expected = server.complete(prompt="Hi", max_tokens=400, ignore_eos=True, temperature=0)["choices"][0]["text"]
    body = {**BODY, "stream": True, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        parts = response.iter_bytes(2000)
        seen = [next(parts)]
        until(server.is_idle)
        seen += parts
    assert "".join(text_of(event) for event in events_of(b"".join(seen).decode())[:-1]) == expected
