"""Rows of the list of known faults that concern running a server."""

from __future__ import annotations

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import psutil
import pytest

from tests.server.serving import MODEL, Served, error_of, serve, until
from vtoken.server.middleware import OPEN_PATHS

BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 900, "ignore_eos": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def guarded(folder):
    """With keys, and pages of one origin that may call it."""
    settings = {"api_key": ("key-1", "key-2"), "allowed_origins": ("https://page.example",)}
    with serve(folder, **settings) as served:
        yield served


def gone_after(server: Served, path: str, body: dict, seconds: float) -> None:
    """A client that sends a request and cuts the connection."""
    with socket.create_connection(server.http.base_url.netloc.decode().split(":")) as connection:
        data = httpx.Request("POST", server.url + path, json=body)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data.content)}\r\n\r\n".encode() + data.content)
        time.sleep(seconds)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_u02_clients_who_go_away(server, path):
    """Queued, in their prompts or in their answers, streaming or not: within a moment all is back."""
    draw = random.Random(0)
    long = {**(BODY if path == "/v1/completions" else CHAT), "max_tokens": 900}

    def leave(i: int) -> None:
        more = {"prompt": ["x" * 400, "y"]} if path == "/v1/completions" and i % 3 == 0 else {}
        gone_after(server, path, {**long, "stream": i % 2 == 0, "n": 1 + i % 2, **more}, draw.random() * 0.2)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(60)))
    until(server.is_idle, 30)
    assert server.http.get("/load").json() == {"server_load": 0, "queued": 0}
    assert server.complete(prompt="x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_u01_what_can_never_fit_is_refused_at_once(folder):
    with serve(folder, {"num_blocks": 16, "max_model_len": 256}) as server:
        error = error_of(server.post("/v1/completions", {**BODY, "prompt": "x" * 300}), param="prompt")
        assert "255" in error["message"]
        error = error_of(server.post("/v1/completions", {**BODY, "n": 12, "max_tokens": 200}), param="n")
        assert "256 tokens" in error["message"]
        assert server.complete(prompt="x" * 200, max_tokens=4096, ignore_eos=True)["usage"]["completion_tokens"] == 56


def test_u46_a_full_queue(folder):
    """429 at once, with Retry-After; the accepted ones all end; n counts as n."""
    with serve(folder, {"max_num_seqs": 4}, max_queued_requests=8) as server:
        go = threading.Event()
        execute = server.llm.engine.executor.execute
        server.llm.engine.executor.execute = lambda plan: go.wait(30) and execute(plan)

        def ask(i: int) -> httpx.Response:
            return httpx.post(
                server.url + "/v1/completions", json={**BODY, "max_tokens": 3, "n": 1 + i % 2}, timeout=60
            )

        with ThreadPoolExecutor(40) as pool:
            answers = [pool.submit(ask, i) for i in range(40)]
            until(lambda: sum(answer.done() for answer in answers) >= 25)
            assert server.llm.num_queued <= 8
            go.set()
            responses = [answer.result() for answer in answers]
        refused = [response for response in responses if response.status_code != 200]
        assert len(refused) >= 25
        for response in refused:
            assert error_of(response, 429)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        assert all(len(response.json()["choices"]) >= 1 for response in responses if response.status_code == 200)
        until(server.is_idle)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"prompt": ["x"] * 9}, "prompt"),
        ({"prompt": [[1], [2]] * 8, "n": 2}, "prompt"),
        ({"prompt": ["x"] * 3, "n": 3}, "n"),
        ({"prompt": ["x"] * 3, "n": 1, "best_of": 3}, "best_of"),
    ],
)
def test_u46_prompts_that_can_never_wait_together(folder, more, field):
    """To try again later would be in vain; nothing of them is queued."""
    with serve(folder, max_queued_requests=8) as server:
        error = error_of(server.post("/v1/completions", {**BODY, **more}), 400, field)
        assert "at most 8 may wait (max_queued_requests)" in error["message"]
        assert error["message"].startswith(f"{field}: ")
        assert server.llm.num_refused == 0
        assert server.ask(lambda engine: engine.stats()).scheduler.steps == 0


def test_u46_what_fits_into_an_idle_queue(folder):
    """As many prompts as may wait, and one prompt with more choices than that."""
    with serve(folder, max_queued_requests=8) as server:
        few = {"max_tokens": 2, "ignore_eos": True}
        assert len(server.complete(prompt=["x"] * 4, n=2, **few)["choices"]) == 8
        until(server.is_idle)
        assert len(server.complete(prompt="x", n=12, **few)["choices"]) == 12


def test_u17_health_while_a_step_hangs(folder, monkeypatch):
    """503 within the limit, and 200 again after it; the process lives all the time."""
    with serve(folder, stuck_after=0.3) as server:
        go = threading.Event()
        execute = server.llm.engine.executor.execute
        monkeypatch.setattr(server.llm.engine.executor, "execute", lambda plan: go.wait(30) and execute(plan))
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.complete, prompt="x", max_tokens=3)
            until(lambda: server.http.get("/health").status_code == 503)
            assert "no step has ended" in error_of(server.http.get("/health"), 503)["message"]
            assert server.http.get("/ping").status_code == 503
            assert server.http.get("/live").status_code == 200
            go.set()
            assert answer.result()
        until(lambda: server.http.get("/health").status_code == 200)


def test_u17_an_engine_that_dies(folder, monkeypatch, caplog):
    """Pending calls get an error, not silence; then everything is 503, but for what needs no engine."""
    with serve(folder) as server:
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(server.post, "/v1/completions", {**BODY, "stream": i % 2 == 0}) for i in range(4)]
            until(lambda: server.http.get("/load").json()["server_load"] == 4)
            monkeypatch.setattr(server.llm.engine, "_report", lambda *facts: 1 / 0)
            for i, response in enumerate(answer.result() for answer in answers):
                if i % 2 == 0 and response.status_code == 200:  # a stream that had begun
                    assert response.text.split("data: ")[-1].startswith('{"error": ')
                else:
                    error_of(response, 500)
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/live").status_code == 200
        error_of(server.post("/v1/completions", BODY), 503)
        error_of(server.post("/v1/chat/completions", CHAT), 503)
        assert server.http.get("/v1/models").status_code == 200
        monkeypatch.undo()


def test_u44_every_route_asks_for_a_key(guarded):
    """Deny by default: also what is not there, and the pages of the framework."""
    paths = [
        (method, path)
        for path, methods in guarded.http.get("/openapi.json", headers=bearer("key-1")).json()["paths"].items()
        for method in methods
    ]
    assert len(paths) >= 10
    paths += [("get", "/docs"), ("get", "/openapi.json"), ("get", "/redoc"), ("get", "/nothing"), ("post", "/v1/x")]
    for method, path in paths:
        url = path.replace("{model}", "tiny")
        open_to_all = path in OPEN_PATHS
        for headers in (
            {},
            bearer("wrong"),
            {"Authorization": "Bearer"},
            {"Authorization": "key-1"},
            {"Authorization": "Basic key-1"},
        ):
            with guarded.http.stream(method, url, headers=headers) as response:  # that of the dashboard has no end
                assert (response.status_code == 401) != open_to_all, (method, path, headers)
                if not open_to_all:
                    response.read()
                    assert error_of(response, 401)["code"] == "invalid_api_key"
                    assert response.headers["www-authenticate"] == "Bearer"
        for headers in (bearer("key-1"), bearer("key-2"), {"Authorization": "bearer key-2"}):
            with guarded.http.stream(method, url, headers=headers) as response:
                assert response.status_code != 401
    assert {path for _, path in paths} >= {"/health", "/live", "/ping", "/metrics"}
    assert guarded.http.options("/v1/completions").status_code == 204
    assert guarded.http.get("//v1/models").status_code == 401
    assert guarded.http.get("/health/../v1/models").status_code == 401


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_metrics(guarded, server, folder):
    """They need a key too, unless told otherwise."""
    server.complete(prompt="x", max_tokens=1)
    text = server.http.get("/metrics").text
    assert 'vtoken:generation_tokens_total{engine="0",model_name="tiny"}' in text
    assert guarded.http.get("/metrics").status_code == 401
    with serve(folder, api_key="k", metrics_need_key=False, metrics_prefix="vllm:") as other:
        assert "vllm:num_requests_running" in other.http.get("/metrics").text
        assert other.http.get("/load").status_code == 401


@pytest.mark.parametrize("spelling", ["utf-8", "latin-1"])
def test_u44_keys_that_are_not_ascii(folder, spelling):
    with serve(folder, api_key="s\xe9same") as server:
        for key, status in (("s\xe9same", 200), ("sesame", 401), ("s\xe8same", 401)):
            headers = {"Authorization": f"Bearer {key}".encode(spelling)}
            assert server.http.get("/v1/models", headers=headers).status_code == status


def test_a_body_that_never_comes_holds_nothing_for_long(server, monkeypatch):
    monkeypatch.setattr("vtoken.server.body.PATIENCE", 0.2)
    with socket.create_connection(server.http.base_url.netloc.decode().split(":")) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        connection.settimeout(10)
        connection.sendall(head.encode())
        answer = b""
        while part := connection.recv(4096):  # and then the connection is closed
            answer += part
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the rest of the body" in answer
    until(lambda: server.http.get("/load").json()["server_load"] == 0)


def test_u90_pages_of_known_origins(guarded, server):
    """Headers on all answers of theirs: preflight, 401, 400, streams. Foreign origins get none; off by default."""
    ours, theirs = {"Origin": "https://page.example"}, {"Origin": "https://evil.example"}
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = guarded.http.options("/v1/completions", headers=ours | asking)
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    body = {**BODY, "max_tokens": 1, "stream": True}
    for headers, status in ((bearer("key-1"), 200), (bearer("no"), 401), ({}, 401)):
        response = guarded.post("/v1/completions", body, headers=headers | ours)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert (
            "access-control-allow-origin" not in guarded.post("/v1/completions", body, headers=headers | theirs).headers
        )
    bad = guarded.post("/v1/completions", {**body, "n": 0}, headers=bearer("key-1") | ours)
    assert (bad.status_code, bad.headers["access-control-allow-origin"]) == (400, "https://page.example")
    assert "access-control-allow-origin" not in server.post("/v1/completions", body, headers=ours).headers


@pytest.mark.parametrize(("num_words", "status"), [(3_750_000, 400), (5_000_000, 413)])
def test_u43_a_huge_prompt_stalls_nobody(server, num_words, status):
    """A stream and /health go on while 15 MB are read, decoded and refused by their length, and while 20 MB are not.

    The list allows half a second. It is counted in processor time of this process, in which client, server and engine
    run: whatever work keeps others waiting spends it, and what else the machine does adds nothing.
    """
    huge = b'{"model": "tiny", "max_tokens": 1, "prompt": "' + b"x y " * num_words + b'"}'
    beats, events, has_begun, is_over = [], [], threading.Event(), threading.Event()

    def beat() -> None:
        with httpx.Client(base_url=server.url) as client:
            while not is_over.is_set():
                assert client.get("/health").status_code == 200
                beats.append(time.process_time())
                time.sleep(0.02)

    def read() -> None:
        while not is_over.is_set():
            body = {**BODY, "model": "tiny", "max_tokens": 900, "ignore_eos": True, "stream": True}
            with server.http.stream("POST", "/v1/completions", json=body) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        events.append(time.process_time())
                        has_begun.set()
                    if is_over.is_set():
                        return

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(beat), pool.submit(read)]
        assert has_begun.wait(20)
        begun = time.process_time()
        error_of(server.http.post("/v1/completions", content=huge, headers=JSON, timeout=120), status)
        ended = time.process_time()
        is_over.set()
        for each in waiting:
            each.result()
    for moments in (beats, events):
        assert max(b - a for a, b in pairwise([begun, *(m for m in moments if begun < m < ended), ended])) < 0.5


def test_u68_huge_bodies(server):
    """413, at once where the length is announced, and nothing of them is kept."""
    with socket.create_connection(server.http.base_url.netloc.decode().split(":")) as connection:
        started = time.monotonic()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 200000000"
        connection.sendall(f"{head}\r\n\r\n".encode() + b"x" * 100_000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        assert time.monotonic() - started < 1
    before = psutil.Process().memory_info().rss
    part = b"x" * 2**20
    chunks = (part for _ in range(50))
    error_of(server.http.post("/v1/completions", content=chunks, headers=JSON), 413)
    error_of(server.http.post("/v1/completions", content=part * 17, headers=JSON), 413)
    assert psutil.Process().memory_info().rss - before < 60 * 2**20
    assert server.complete(prompt="x", max_tokens=1)


def test_u68_many_prompts_and_members(server):
    started = time.monotonic()
    error_of(server.post("/v1/completions", {**BODY, "prompt": ["x"] * 10_000}), param="prompt")
    error_of(server.post("/v1/completions", {**BODY, "stop_token_ids": [0.5] * 10**6}), param="stop_token_ids")
    error_of(
        server.post("/v1/completions", {**BODY, "logit_bias": {str(i): "x" for i in range(10**5)}}), param="logit_bias"
    )
    error_of(server.post("/v1/completions", {**BODY, "prompt": [0.5] * 10**5}), param="prompt")
    error_of(server.post("/v1/completions", {**BODY, "prompt": [7] * 10**5}), param="prompt")
    error_of(server.post("/v1/chat/completions", {**CHAT, "messages": [5] * 10**5}), param="messages")
    assert time.monotonic() - started < 10


def test_a_root_path(folder):
    """Whether or not the proxy cuts it off."""
    with serve(folder, root_path="/llm", api_key="k") as server:
        for prefix in ("", "/llm"):
            assert server.http.get(f"{prefix}/health").status_code == 200
            assert server.http.get(f"{prefix}/v1/models").status_code == 401
            assert server.http.get(f"{prefix}/v1/models", headers=bearer("k")).status_code == 200
        page = server.http.get("/openapi.json", headers=bearer("k")).json()
        assert page["servers"] == [{"url": "/llm"}]


def test_request_ids(server):
    assert server.http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = server.http.get("/nothing", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
    assert len(made) == 32


def test_u88_models(server):
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["id"] == MODEL
    assert model["object"] == "model"
    assert model["max_model_len"] == 1024
    assert model["owned_by"] == "vtoken"
    assert server.http.get("/v1/models/tiny").json() == model
    error_of(server.http.get("/v1/models/gpt-4"), 404, "model")


def test_u89_cached_tokens(server):
    """Always there: 0, then what was found."""
    prompt = [(7 * i) % 250 for i in range(64)]
    first = server.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    again = server.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (first, again) == (0, 48)
    options = {"stream_options": {"include_usage": True}}
    streamed = server.stream("/v1/completions", {"prompt": prompt, "max_tokens": 1, **options})[-2]["usage"]
    assert streamed["prompt_tokens_details"]["cached_tokens"] == 48
    salted = server.complete(prompt=prompt, max_tokens=1, cache_salt="other")["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0  # U81
