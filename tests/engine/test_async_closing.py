"""The end of an `AsyncLLM`: asked for, in time, or because nobody needs it any more."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tests.engine.async_engines import GREEDY, LONG, read, settings
from vtoken import LLM, AsyncLLM, EngineError
from vtoken.engine.outputs import join_deltas


@pytest.mark.parametrize("drain", [False, True])
def test_closing_while_it_runs(folder, drain):
    async def main():
        llm = AsyncLLM(str(folder), **settings())
        params = LONG.replace(max_tokens=100)
        streams = [llm.generate(f"number {i}", params, output_kind="delta") for i in range(4)]
        seen = [[await stream.__anext__()] for stream in streams]
        closing = asyncio.create_task(llm.aclose(drain=drain))
        await asyncio.sleep(0)
        for stream, parts in zip(streams, seen, strict=True):
            parts += await read(stream)
        await closing
        for parts in seen:
            [choice] = join_deltas(parts).outputs
            assert choice.finish_reason == ("length" if drain else "abort")
            assert (len(choice.token_ids) == 100) == drain
        assert not llm.is_alive
        assert (await llm.stats()).usage.held_blocks == 0
        with pytest.raises(EngineError, match="closed"):
            llm.generate("x")
        llm.close()
        await llm.aclose()
        assert llm.engine.executor.store.nbytes == 0

    asyncio.run(main())


def test_a_drain_ends_in_time(folder):
    async def main():
        llm = AsyncLLM(str(folder), **settings())
        stream = llm.generate("x", LONG, output_kind="delta")
        await stream.__anext__()
        llm.close(drain=True, timeout=0.05)  # blocks this loop: what came meanwhile is read afterwards
        parts = await read(stream)
        assert parts[-1].outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_forgotten_it_closes_by_itself(folder):
    llm = AsyncLLM(str(folder), **settings())
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_running_stream_keeps_it_open(folder):
    async def main():
        stream = AsyncLLM(str(folder), **settings()).generate("x", GREEDY)
        gc.collect()
        assert (await read(stream))[-1].outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_around_an_engine_of_ones_own(folder, expected):
    async def main():
        llm = LLM(str(folder), **settings())
        async with AsyncLLM.from_engine(llm.engine) as face:
            assert (await read(face.generate("Tell me", GREEDY)))[-1].outputs[0].token_ids == expected["Tell me"]
        assert llm.engine.is_closed

    asyncio.run(main())
