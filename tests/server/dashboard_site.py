"""A dashboard on a free port, over an engine that is kept busy, and a browser to look at it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from vtoken import AsyncLLM, SamplingParams
from vtoken.server.app import create_app
from vtoken.server.settings import ServerSettings

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
TEXT = (
    "The keys and values of a request lie in blocks. A policy says which tokens may die; their cells are used again, "
    "survivors are packed together, and whole blocks come back to the pool. <b>Not markup</b> & no more. "
)


class Load:
    """Requests that come and go: as many at a time as are wanted, drawn from a seed."""

    def __init__(self, num_requests: int, *, prompt: int = 120, answer: int = 240) -> None:
        self.num_requests = num_requests  # may be changed at any time; 0 lets it run dry
        self._prompt = prompt
        self._answer = answer

    @contextmanager
    def running(self, llm: AsyncLLM) -> Iterator[None]:
        """In a thread and an event loop of its own, as if it came from elsewhere."""
        has_ended = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._run(llm, has_ended)))
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    async def _run(self, llm: AsyncLLM, has_ended: threading.Event) -> None:
        rng, tasks, number = random.Random(0), set[asyncio.Task[None]](), 0
        while not has_ended.is_set():
            while len(tasks) < self.num_requests:
                task = asyncio.create_task(self._ask(llm, number, rng))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                number += 1
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()

    async def _ask(self, llm: AsyncLLM, number: int, rng: random.Random) -> None:
        params = SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=rng.randint(self._answer // 3, self._answer),
            ignore_eos=True,
            n=3 if number % 7 == 3 else 1,
        )
        text = f"<img src=x onerror=alert({number})> {TEXT}{TEXT}"
        # Every third begins as others do, so that blocks are shared.
        prompt = (TEXT if number % 3 == 0 else text)[: rng.randint(self._prompt // 2, self._prompt)]
        async for _ in llm.generate(prompt, params, request_id=f"req-{number}", output_kind="delta"):
            pass


@contextmanager
def site(
    folder: Path | str, load: Load, *, port: int = 0, name: str = "tiny", api_key: str | None = None, **engine: Any
) -> Iterator[str]:
    """The address of the dashboard of a new server under a load."""
    llm = AsyncLLM(str(folder), **engine)
    app = create_app(llm, ServerSettings(served_model_name=name, api_key=api_key))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        with load.running(llm):
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/dashboard"
    finally:
        llm.close()  # first, as the server does it: who watches is told of the end
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What `condition` gives once that is true."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def require_browser() -> None:
    """Skip without one, unless it was promised: VTOKEN_BROWSER=required, as in `.ci/run` where it could get one."""
    if CHROMIUM is None or DRIVER is None:
        reason = "no chromium and chromedriver here: apt-get install chromium chromium-driver"
        assert os.environ.get("VTOKEN_BROWSER") != "required", reason
        pytest.skip(reason)


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium that keeps its console."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def set_screen(driver: Any, width: int, height: int, *, dark: bool = False) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
