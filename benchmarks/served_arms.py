"""The processes of `bench_server.py`: engine, server, clients, and one who watches the dashboard.

Each is told over a pipe what to do and answers there, and is held to the cores that it is given, before it loads torch.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil

from benchmarks.streaming_client import Answer, stream_all

MODEL = "smollm2-135m"
PATH = "/v1/completions"


class Arm:
    """A process that does one thing at a time, and what it costs."""

    def __init__(self, main: Callable[..., None], cores: list[int], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(cores, main, theirs, *args), daemon=True)
        self._process.start()
        theirs.close()
        self.hello = self._pipe.recv()
        """What it says once it is ready."""
        self._facts = psutil.Process(self._process.pid)

    def ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all its threads since it began."""
        times = self._facts.cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def _begin(cores: list[int], main: Callable[..., None], pipe: Connection, *args: Any) -> None:
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    main(pipe, *args)


def offline(pipe: Connection, settings: dict[str, Any]) -> None:
    """Asked (prompts, params), answers (seconds, texts, tokens)."""
    from vtoken import LLM, SamplingParams

    with LLM(MODEL, **settings) as llm:
        pipe.send(None)
        while True:
            prompts, params = pipe.recv()
            started = time.perf_counter()
            outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
            seconds = time.perf_counter() - started
            answers = [output.outputs[0] for output in outputs]
            pipe.send((seconds, [each.text for each in answers], sum(len(each.token_ids) for each in answers)))


def online(pipe: Connection, settings: dict[str, Any]) -> None:
    """The same from asyncio, without HTTP: what threads, mailboxes and text in pieces cost."""
    from vtoken import AsyncLLM, SamplingParams

    async def answer(llm: AsyncLLM, prompt: list[int], params: dict[str, Any]) -> tuple[str, int]:
        text, num_tokens = "", 0
        async for output in llm.generate(prompt, SamplingParams(**params), output_kind="delta"):
            text += output.outputs[0].text
            num_tokens += len(output.outputs[0].token_ids)
        return text, num_tokens

    async def main() -> None:
        async with AsyncLLM(MODEL, **settings) as llm:
            pipe.send(None)
            while True:
                prompts, params = await asyncio.to_thread(pipe.recv)
                started = time.perf_counter()
                answers = await asyncio.gather(*(answer(llm, prompt, params) for prompt in prompts))
                seconds = time.perf_counter() - started
                pipe.send((seconds, [text for text, _ in answers], sum(count for _, count in answers)))

    asyncio.run(main())


def server(pipe: Connection, settings: dict[str, Any]) -> None:
    """Says its port."""
    import uvicorn

    from vtoken import AsyncLLM
    from vtoken.server.app import create_app
    from vtoken.server.settings import ServerSettings

    llm = AsyncLLM(MODEL, **settings)
    app = create_app(llm, ServerSettings(log_level="warning"), model=MODEL)
    listening = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", server_header=False))
    threading.Thread(target=_tell_port, args=(pipe, listening), daemon=True).start()
    listening.run()


def _tell_port(pipe: Connection, listening: Any) -> None:
    while not listening.started:
        time.sleep(0.05)
    [listener] = listening.servers[0].sockets
    pipe.send(listener.getsockname()[1])


def clients(pipe: Connection) -> None:
    """Asked (port, bodies, num_clients), answers (seconds, answers)."""
    pipe.send(None)
    while True:
        port, bodies, num_clients = pipe.recv()
        try:
            found: tuple[float, list[Answer]] | Exception = asyncio.run(stream_all(port, PATH, bodies, num_clients))
        except Exception as error:
            found = error
        pipe.send(found)


def watcher(pipe: Connection) -> None:
    """Asked a port, looks at the dashboard there until it is asked None; then answers how many frames it got."""
    pipe.send(None)
    while True:
        [port] = pipe.recv()
        stop, frames = threading.Event(), [0]
        thread = threading.Thread(target=_watch, args=(port, stop, frames))
        thread.start()
        pipe.send(None)
        pipe.recv()
        stop.set()
        thread.join()
        pipe.send(frames[0])


def _watch(port: int, stop: threading.Event, frames: list[int]) -> None:
    last = 0
    while not stop.is_set():  # the server ends a stream now and then, to be asked again
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/dashboard/stream?since={last}") as stream:
            for line in stream:
                if line.startswith(b"id: "):
                    last, frames[0] = int(line[4:]) + 1, frames[0] + 1
                if stop.is_set():
                    break
