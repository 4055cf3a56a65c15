"""Requests of an `AsyncLLM` whose reader leaves, in every state: nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from tests.engine.async_engines import GREEDY, LONG, held, idle, opened, read, until


def test_break_ends_the_request(folder):
    async def main():
        async with opened(folder) as llm:
            async for output in llm.generate("x", LONG):
                if len(output.outputs[0].token_ids) >= 2:
                    break
            await idle(llm)
            stats = await llm.stats()
            assert stats.scheduler.tokens_generated < 100

    asyncio.run(main())


def test_an_exception_in_the_loop_ends_the_request(folder):
    async def main():
        async with opened(folder) as llm:

            async def failing():
                async with llm.generate("x", LONG) as stream:
                    async for _ in stream:
                        raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await failing()
            await idle(llm)

    asyncio.run(main())


def test_a_timeout_ends_the_request(folder):
    async def main():
        async with opened(folder) as llm:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(read(llm.generate("x", LONG, output_kind="final")), 0.05)
            await idle(llm)
            assert (await llm.stats()).scheduler.tokens_generated < 400

    asyncio.run(main())


def test_a_stream_that_was_never_read_is_no_request(folder):
    async def main():
        async with opened(folder) as llm:
            stream = llm.generate("x", LONG)
            del stream
            unread = llm.generate("x", LONG)
            await unread.aclose()
            assert await read(unread) == []
            assert (await llm.stats()).scheduler.steps == 0

    asyncio.run(main())


STATES = ["tokenizing", "inbox", "queued", "prefilling", "running", "preempted", "swapped"]


@pytest.mark.parametrize("way", ["leave", "cancel", "abort"])
@pytest.mark.parametrize("state", STATES)
def test_the_end_comes_in_every_state(folder, expected, state, way, monkeypatch):
    """U02: blocks are back, the id is free, and who runs beside it does not notice."""
    more = {
        "queued": {"max_num_seqs": 1},
        "preempted": {"num_blocks": 26, "max_model_len": 400},
        "swapped": {"num_blocks": 26, "max_model_len": 400, "preemption": "swap", "swap_space": "4MiB"},
    }.get(state, {})

    async def main():
        async with opened(folder, **more) as llm:
            tokenizing, go = threading.Event(), None
            if state == "tokenizing":
                encode = llm.get_tokenizer().encode

                def slowly(text):
                    if text == "victim":
                        tokenizing.wait(20)
                    return encode(text)

                monkeypatch.setattr(llm.get_tokenizer(), "encode", slowly)
            beside = asyncio.create_task(read(llm.generate("once upon a time", GREEDY)))
            others = []
            is_crowded = state in ("preempted", "swapped")
            if is_crowded or state == "queued":
                await until(lambda: llm.engine.scheduler.counters.steps > 0)
                others = [asyncio.create_task(read(llm.generate("older", LONG.replace(max_tokens=300))))]
                await until(lambda: llm.engine.scheduler.counters.tokens_generated > 11)
            if state == "inbox":
                go = held(llm)
            prompt = [5] * 300 if state == "prefilling" else "victim"
            stream = llm.generate(prompt, LONG.replace(max_tokens=380 if is_crowded else 180), "victim")
            reader = asyncio.create_task(read(stream))

            def request():
                mailbox = llm._reception.find("victim")
                return None if mailbox is None else mailbox.request

            def is_there():
                if state in ("tokenizing", "inbox"):
                    return llm._reception.find("victim") is not None
                found = request()
                if found is None:
                    return False
                status = found.status.value
                if state == "queued":
                    return status == "waiting"
                if state == "prefilling":
                    return status == "running"
                if state == "running":
                    return bool(found.sequences[0].num_output_tokens)
                return status == state

            await until(is_there)
            if state in ("tokenizing", "inbox"):
                await asyncio.sleep(0.05)
            if way == "cancel":
                reader.cancel()
            elif way == "leave":
                await stream.aclose()
                if reader.cancel():
                    await asyncio.wait([reader])
            else:
                aborted = asyncio.create_task(llm.abort(["victim", "unknown", ""]))
                if go is not None:
                    await asyncio.sleep(0.02)
                    go.set()
                await aborted
                assert llm._reception.find("victim") is None
            if go is not None:
                go.set()
            tokenizing.set()
            if way == "abort":
                seen = await reader
                assert seen[-1].finished
                assert seen[-1].outputs[0].finish_reason == "abort"
            else:
                await asyncio.wait([reader])
            await until(lambda: llm._reception.find("victim") is None)
            [again] = await read(llm.generate("Tell me", GREEDY, "victim", output_kind="final"))
            assert again.outputs[0].token_ids == expected["Tell me"]
            assert (await beside)[-1].outputs[0].token_ids == expected["once upon a time"]
            for other in others:
                assert len((await other)[-1].outputs[0].token_ids) == 300

    asyncio.run(main())


def test_a_storm_of_cuts_leaves_nothing(folder, expected):
    """U02: 200 requests, half of them streams, each cut after a random time."""
    random.seed(1)

    async def one(llm, i):
        params = LONG.replace(n=1 + i % 3, max_tokens=250)
        kind = "delta" if i % 2 else "final"
        try:
            async with asyncio.timeout(random.random() * 0.3):
                await read(llm.generate(f"request {i} " + "x" * (i % 90), params, output_kind=kind))
        except TimeoutError:
            return 1
        return 0

    async def main():
        async with opened(folder) as llm:
            cut = sum(await asyncio.gather(*(one(llm, i) for i in range(200))))
            assert cut > 150
            await idle(llm)
            [output] = await read(llm.generate("Tell me", GREEDY, output_kind="final"))
            assert output.outputs[0].token_ids == expected["Tell me"]

    asyncio.run(main())


def test_aborting_what_is_not_there_does_nothing(folder):
    async def main():
        async with opened(folder) as llm:
            await llm.abort(["", "x", "x"])
            await llm.abort([])
            seen = await read(llm.generate("x", GREEDY, "x"))
            await llm.abort("x")
            assert seen[-1].outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_an_id_is_free_as_soon_as_its_owner_has_left(folder, expected):
    """The old owner's end must not reach the new one, nor the old one's leaving end it."""

    async def main():
        async with opened(folder) as llm:
            for _ in range(20):
                old = llm.generate("x", LONG, "same")
                await old.__anext__()
                await llm.abort("same")
                seen = asyncio.create_task(read(llm.generate("Tell me", GREEDY, "same")))
                await asyncio.sleep(0)
                await old.aclose()
                assert (await seen)[-1].outputs[0].token_ids == expected["Tell me"]

    asyncio.run(main())
