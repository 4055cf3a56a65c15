"""`Recorder`: the last minutes of an engine as frames, and a stream of them for each who watches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

from vtoken.base.errors import EngineError
from vtoken.engine.async_llm import AsyncLLM
from vtoken.server.dashboard.frames import Frame, FrameEncoder, Observer

logger = logging.getLogger("vtoken")

WATCHED_SECONDS = 0.2  # from frame to frame while somebody watches
UNWATCHED_SECONDS = 1.0  # and while nobody does: kept for who comes when something was odd
LEAST_SECONDS = 0.05  # whoever comes and goes


class Recorder:
    """Asks the engine's thread for a snapshot now and then, between two steps; a step itself costs nothing for it.

    Frames are encoded once, whoever watches, and kept for `seconds` in at most `max_bytes`. An engine that has nothing
    to do is looked at only while somebody watches.
    """

    def __init__(self, llm: AsyncLLM, *, seconds: float = 300.0, max_bytes: int = 24 * 2**20) -> None:
        self.observer = Observer()
        self.error: str | None = None  # why there are no more frames
        self._llm = llm
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._encoder = FrameEncoder()
        self._frames: deque[tuple[float, Frame]] = deque()  # (when, frame); the first one is a key
        self._num_bytes = 0
        self._num_watching = 0
        self._is_idle = False  # the last snapshot showed nobody
        self._came = asyncio.Condition()
        self._wanted = asyncio.Event()  # somebody has begun to watch

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_frames(self) -> int:
        return len(self._frames)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Records until the end of the block."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await self._end("the server is closing")

    async def _run(self) -> None:
        while self._llm.is_alive:
            is_watched = self._num_watching > 0
            if is_watched or not (self._is_idle and self._llm.last_step_age == 0):
                try:
                    await self.take()
                except EngineError:
                    break
                except Exception:  # a fault of ours must not end what others see
                    logger.exception("the dashboard could not look at the engine; it goes on trying")
            await asyncio.sleep(LEAST_SECONDS)
            rest = (WATCHED_SECONDS if self._num_watching else UNWATCHED_SECONDS) - LEAST_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), rest)
            self._wanted.clear()
        await self._end("the engine has ended")

    async def take(self) -> Frame:
        """One more frame, now. Raises EngineError if the engine has died."""
        snapshot = await self._llm.run_in_engine(self.observer.look)
        stats = snapshot.stats
        self._is_idle = not (stats.num_running or stats.num_waiting or stats.num_preempted)
        frame = self._encoder.encode(snapshot)
        now = time.monotonic()
        self._frames.append((now, frame))
        self._num_bytes += len(frame.data)
        while self._frames[0][0] < now - self._seconds or self._num_bytes > self._max_bytes:
            if not self._drop_group():
                break
        async with self._came:
            self._came.notify_all()
        return frame

    def _drop_group(self) -> bool:
        """Forget the oldest key frame and those that lean on it; False where it is the only one."""
        keys = (index for index, (_, frame) in enumerate(self._frames) if frame.is_key and index)
        end = next(keys, None)
        if end is None:
            return False
        for _ in range(end):
            self._num_bytes -= len(self._frames.popleft()[1].data)
        return True

    async def _end(self, why: str) -> None:
        self.error = self.error or why
        async with self._came:
            self._came.notify_all()

    async def watch(self, since: int, seconds: float) -> AsyncGenerator[Frame]:
        """The frames from number `since` on that are kept, or all of them, then each new one; for so many seconds.

        Ends early with the recorder. Who is slow misses frames: he goes on with the oldest kept key frame.
        """
        end = time.monotonic() + seconds
        self._num_watching += 1
        self._wanted.set()
        try:
            while True:
                frame = self._next(since)
                if frame is not None:
                    yield frame
                    since = frame.number + 1
                elif self.error is not None or not await self._wait(since, end):
                    return
        finally:
            self._num_watching -= 1

    def _next(self, since: int) -> Frame | None:
        """Frame number `since`; the oldest one where that has gone, or was another server's; None if it is to come."""
        if not self._frames:
            return None
        behind = since - self._frames[0][1].number
        if behind == len(self._frames):
            return None
        return self._frames[behind if 0 <= behind < len(self._frames) else 0][1]

    async def _wait(self, since: int, end: float) -> bool:
        """Whether a frame from number `since` on has come, or the end of all."""
        try:
            async with self._came, asyncio.timeout(end - time.monotonic()):
                await self._came.wait_for(lambda: self.error is not None or self._last_number >= since)
        except TimeoutError:
            return False
        return True

    @property
    def _last_number(self) -> int:
        return self._frames[-1][1].number if self._frames else -1
