"""A real server on a free port, in a thread of its own, around a tiny model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from vtoken import AsyncLLM
from vtoken.server.app import create_app
from vtoken.server.connection import Connection
from vtoken.server.settings import ServerSettings

ENGINE = {"num_blocks": 256, "max_model_len": 1024, "max_num_batched_tokens": 64, "max_num_seqs": 16, "seed": 0}
MODEL = "tiny"


class Served:
    """What a test may ask of a running server."""

    def __init__(self, llm: AsyncLLM, url: str) -> None:
        self.llm = llm
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def complete(self, **body: Any) -> Any:
        """The answer to a completion that must succeed."""
        return checked(self.post("/v1/completions", {"model": MODEL, **body}))

    def chat(self, *messages: Any, **body: Any) -> Any:
        messages = messages or ({"role": "user", "content": "Hi"},)
        return checked(self.post("/v1/chat/completions", {"model": MODEL, "messages": list(messages), **body}))

    def stream(self, path: str, body: Any) -> list[Any]:
        """The events of a stream that must succeed, decoded; "[DONE]" is left as it is."""
        with self.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
            response.read()
            assert response.status_code == 200, response.text
            assert response.headers["content-type"].startswith("text/event-stream")
            return events_of(response.text)

    def is_idle(self) -> bool:
        stats = self.ask(lambda engine: engine.stats())
        usage = stats.usage
        counts = (stats.num_running, stats.num_waiting, stats.num_preempted, usage.held_blocks, self.llm.num_queued)
        return counts == (0, 0, 0, 0, 0) and not self.llm._reception.everybody()

    def ask(self, work: Callable[[Any], Any]) -> Any:
        """`work(engine)` in the engine's thread."""
        return asyncio.run(self.llm.run_in_engine(work))


def checked(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def events_of(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def error_of(response: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The error object of an answer that must be one, in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert len(response.content) < 4096
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    for hidden in ("Traceback", "vtoken.", "Error:", ".py"):
        assert hidden not in error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@contextmanager
def serve(folder: Path, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Served]:
    settings = {"served_model_name": MODEL, "log_level": "warning"} | settings
    server_settings = ServerSettings(**settings)
    llm = AsyncLLM(
        str(folder),
        max_queued_requests=server_settings.max_queued_requests,
        max_queued_tokens=server_settings.max_queued_tokens,
        **ENGINE | (engine or {}),
    )
    app = create_app(llm, server_settings)
    server = uvicorn.Server(
        uvicorn.Config(app, http=Connection, port=0, log_level="warning", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    [listener] = server.servers[0].sockets
    served = Served(llm, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield served
    finally:
        served.http.close()
        server.should_exit = True
        thread.join(20)
        llm.close()
        assert not thread.is_alive()
