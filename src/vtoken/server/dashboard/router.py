"""The routes of the dashboard: a page that holds no data, and the data that it asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Query, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse

from vtoken.base.errors import EngineError
from vtoken.engine.async_llm import AsyncLLM
from vtoken.engine.engine import Engine
from vtoken.server.dashboard.frames import EVENT, FACTS, ROW, STATES, FrameEncoder
from vtoken.server.dashboard.page import page
from vtoken.server.dashboard.recorder import Recorder
from vtoken.server.dashboard.tokens import TokenStates, look_at_tokens, to_json
from vtoken.server.errors import unavailable

T = TypeVar("T")

# Then the page asks again for what has come since: no server has to wait longer for it when it is to end.
STREAM_SECONDS = 20.0


def dashboard_router(llm: AsyncLLM, *, title: str = "") -> APIRouter:
    """`/dashboard`, and below it what the page asks for: `state`, `stream`, `requests/{number}`.

    It records while the application runs that includes it. `title`: what is served, for the page's head. The page
    itself holds no data, so it may be open where the data needs a key.
    """
    recorder = Recorder(llm)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with recorder.running():
            yield

    # Made for the page, and to change with it: no part of the described API.
    router = APIRouter(prefix="/dashboard", include_in_schema=False, lifespan=lifespan)

    @router.get("", response_class=HTMLResponse)
    async def document() -> HTMLResponse:
        content, policy = page()
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return HTMLResponse(content, headers=headers | {"X-Content-Type-Options": "nosniff"})

    @router.get("/")
    async def slashed() -> Response:
        """The page's place is its name without a slash, as what it asks for is beside it; under any path of a proxy."""
        return RedirectResponse("../dashboard")

    @router.get("/state")
    async def state() -> Response:
        """What does not change, what the columns of frames are called, and a frame of this moment."""
        config = llm.engine.scheduler.config
        snapshot = await _ask(llm, recorder.observer.peek)
        frame = FrameEncoder().encode(snapshot).data.decode()
        facts = {
            "title": title,
            "num_blocks": snapshot.stats.usage.num_blocks,
            "block_size": snapshot.stats.usage.block_size,
            "bytes_per_block": snapshot.stats.bytes_per_block,
            "max_model_len": snapshot.stats.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "names": {"facts": FACTS, "rows": ROW, "states": STATES, "events": EVENT},
        }
        content = '{"facts":' + _json(facts) + ',"frame":' + frame + "}"
        return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})

    @router.get("/stream")
    async def stream(since: int = Query(0, ge=0)) -> StreamingResponse:
        """Frames from number `since` on as server-sent events; ends after some seconds, to be asked for again."""

        async def events() -> AsyncIterator[bytes]:
            yield b"retry: 1000\n\n"
            async with aclosing(recorder.watch(since, STREAM_SECONDS)) as frames:
                async for frame in frames:
                    yield b"id: %d\ndata: %b\n\n" % (frame.number, frame.data)
            if recorder.error is not None:
                yield b"event: end\ndata: " + _json(recorder.error).encode() + b"\n\n"

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    @router.get("/requests/{number}", response_model=None)
    async def tokens(
        number: int, choice: int = Query(0, ge=0), start: int | None = Query(None, ge=0)
    ) -> dict[str, Any] | Response:
        """The tokens of one choice, by the number that frames give its request. 204 for one that is not there, or ended
        too long ago: requests go while somebody looks, which is no error, nor one line more in a browser's console."""

        def look(engine: Engine) -> TokenStates | None:
            request = recorder.observer.find(engine, number)
            if request is None or choice >= len(request.sequences):
                return None
            return look_at_tokens(engine, request, choice, start)

        states = await _ask(llm, look)
        if states is None:
            return Response(status_code=204)
        return await asyncio.to_thread(to_json, states, llm.engine.tokenizer)

    return router


async def _ask(llm: AsyncLLM, work: Callable[[Engine], T]) -> T:
    try:
        return await llm.run_in_engine(work)
    except EngineError as error:
        raise unavailable(str(error)) from None


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
