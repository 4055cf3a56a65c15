"""What an `AsyncLLM` refuses: wrong requests, ids in use, full queues."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.engine.async_engines import GREEDY, LONG, held, idle, opened, read, settings
from vtoken import AsyncLLM, ConfigError, QueueFullError, RequestError, SamplingParams


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "x", "request_id": ""}, "request_id"),
        ({"prompt": "x", "request_id": 5}, "request_id"),
        ({"prompt": "x", "output_kind": "deltas"}, "output_kind"),
        ({"prompt": "x", "sampling_params": {"n": 1}}, "params"),
        ({"prompt": "x", "sampling_params": SamplingParams(stop_token_ids=[258])}, "stop_token_ids"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [1, 258]}, "prompt"),
        ({"prompt": [1] * 500}, "prompt"),
        ({"prompt": "x", "sampling_params": SamplingParams(n=9)}, "n"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_queued(shared, arguments, field):
    async def main():
        with pytest.raises(RequestError) as refusal:
            await read(shared.generate(**arguments))
        assert refusal.value.field == field
        assert (await shared.stats()).scheduler.steps == 0
        await idle(shared)

    asyncio.run(main())


@pytest.fixture(scope="module")
def shared(folder):
    llm = AsyncLLM(str(folder), **settings())
    yield llm
    llm.close()


def test_two_requests_of_one_id_at_a_time_are_refused(folder):
    async def main():
        async with opened(folder) as llm:
            first = llm.generate("x", LONG, "same")
            await first.start()
            await first.start()  # again is no error
            with pytest.raises(RequestError, match="in use") as refusal:
                await read(llm.generate("y", GREEDY, "same"))
            assert refusal.value.field == "request_id"
            assert (await first.__anext__()).request_id == "same"
            await first.aclose()

    asyncio.run(main())


def test_two_readers_of_one_stream_are_refused(folder):
    async def main():
        async with opened(folder) as llm:
            stream = llm.generate("x", LONG, output_kind="final")
            await stream.start()
            first = asyncio.create_task(stream.__anext__())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="two tasks"):
                await stream.__anext__()
            first.cancel()

    asyncio.run(main())


def test_a_full_queue_refuses_at_once(folder):
    """U46: choices are counted; the accepted ones all end."""

    async def main():
        async with opened(folder, max_queued_requests=8) as llm:
            go = held(llm)
            streams = [llm.generate(f"number {i}", GREEDY.replace(n=1 + i % 2)) for i in range(40)]
            started = time.monotonic()
            found = await asyncio.gather(*(stream.start() for stream in streams), return_exceptions=True)
            assert time.monotonic() - started < 5
            accepted = [stream for stream, error in zip(streams, found, strict=True) if error is None]
            refused = [error for error in found if error is not None]
            assert all(isinstance(error, QueueFullError) for error in refused)
            assert "8 may wait (max_queued_requests)" in str(refused[0])
            assert sum(stream._num_choices for stream in accepted) == llm.num_queued == 8
            go.set()
            for seen in await asyncio.gather(*map(read, accepted)):
                assert seen[-1].finished
            [output] = await read(llm.generate("x", GREEDY.replace(n=8), output_kind="final"))
            assert len(output.outputs) == 8

    asyncio.run(main())


def test_the_queue_is_bounded_in_tokens_too(folder):
    async def main():
        async with opened(folder, max_queued_tokens=100) as llm:
            go = held(llm)
            big, small, more = (llm.generate([1] * size, GREEDY) for size in (300, 1, 50))
            await big.start()  # alone in the queue
            with pytest.raises(QueueFullError, match="max_queued_tokens"):
                await small.start()
            go.set()
            assert (await read(big))[-1].finished
            assert (await read(more))[-1].finished

    asyncio.run(main())


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "8"])
def test_a_limit_that_is_none_is_refused(folder, limit):
    with pytest.raises(ConfigError, match="max_queued_requests: expected a whole number"):
        AsyncLLM(str(folder), max_queued_requests=limit)
