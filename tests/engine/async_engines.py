"""An `AsyncLLM` over the tiny model, watched by its tests: what they read, wait for and hold up."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

from vtoken import AsyncLLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=400)


def settings(**more):
    return {"num_blocks": 64, "max_model_len": 500, "max_num_batched_tokens": 32, "max_num_seqs": 8, "seed": 0} | more


@asynccontextmanager
async def opened(folder: Path, **more):
    """An engine that is found idle and whole at the end, unless the test has closed it."""
    async with AsyncLLM(str(folder), **settings(**more)) as llm:
        yield llm
        if llm.is_alive:
            await idle(llm)


async def idle(llm: AsyncLLM) -> None:
    """Wait until nothing runs; every block is free or cached, and the books agree."""
    for _ in range(500):
        if not await llm.run_in_engine(lambda engine: engine.has_unfinished_requests()):
            break
        await asyncio.sleep(0.01)
    await llm.run_in_engine(lambda engine: engine.scheduler.check())
    stats = await llm.stats()
    usage = stats.usage
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0)
    assert (usage.held_blocks, usage.pinned_blocks) == (0, 0)
    assert usage.free_blocks + usage.cached_blocks == usage.num_blocks
    assert stats.free_host_blocks == stats.num_host_blocks
    assert llm._reception.everybody() == []
    assert llm.num_queued == 0
    await until(lambda: llm.last_step_age == 0)


async def read(stream) -> list:
    return [output async for output in stream]


async def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.002)


def held(llm: AsyncLLM) -> threading.Event:
    """The engine's thread waits until this is set."""
    go, is_there = threading.Event(), threading.Event()
    llm._thread._inbox.put(lambda: (is_there.set(), go.wait(20)))
    is_there.wait(20)
    return go
