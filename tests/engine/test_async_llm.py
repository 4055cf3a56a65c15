"""`AsyncLLM`: answers, and what readers and the engine notice of each other."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from tests.engine.async_engines import GREEDY, LONG, held, idle, opened, read, settings, until
from vtoken import AsyncLLM, EngineError, RequestError
from vtoken.engine.mailbox import _SLIGHTLY_LATE
from vtoken.engine.outputs import join_deltas

# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_every_kind_of_output_tells_the_same_answer(folder, expected, kind):
    async def main():
        async with opened(folder) as llm:
            seen = await read(llm.generate("Tell me", GREEDY, "mine", output_kind=kind))
            last = join_deltas(seen) if kind == "delta" else seen[-1]
            assert last.outputs[0].token_ids == expected["Tell me"]
            assert last.outputs[0].text == llm.get_tokenizer().decode(expected["Tell me"])
            assert {output.request_id for output in seen} == {"mine"}
            assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
            assert len(seen) == 1 or kind != "final"

    asyncio.run(main())


def test_prompts_in_every_form(folder, expected):
    async def main():
        async with opened(folder) as llm:
            for prompt in ("Tell me", list(b"Tell me"), {"prompt": "Tell me", "cache_salt": "a"}):
                [output] = await read(llm.generate(prompt, GREEDY, output_kind="final"))
                assert output.outputs[0].token_ids == expected["Tell me"]
            [output] = await read(llm.generate("Tell me", GREEDY, output_kind="final", cache_salt="b"))
            assert output.num_cached_tokens == 0

    asyncio.run(main())


def test_many_readers_get_their_own_answers(folder, expected):
    async def main():
        async with opened(folder) as llm:
            prompts = [prompt for prompt in expected for _ in range(3)]
            kinds = ["cumulative", "delta", "final"]
            streams = [llm.generate(prompt, GREEDY, output_kind=kinds[i % 3]) for i, prompt in enumerate(prompts)]
            for i, seen in enumerate(await asyncio.gather(*map(read, streams))):
                last = join_deltas(seen) if kinds[i % 3] == "delta" else seen[-1]
                assert last.outputs[0].token_ids == expected[prompts[i]]

    asyncio.run(main())


def test_several_loops_in_several_threads(folder, expected):
    with_error = []

    def in_thread(llm, prompt):
        async def main():
            seen = await read(llm.generate(prompt, GREEDY, output_kind="delta"))
            assert join_deltas(seen).outputs[0].token_ids == expected[prompt]

        try:
            asyncio.run(main())
        except BaseException as error:
            with_error.append(error)

    llm = AsyncLLM(str(folder), **settings())
    threads = [threading.Thread(target=in_thread, args=(llm, f"number {i}")) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert with_error == []
    asyncio.run(idle(llm))
    llm.close()


# --- readers and the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_a_slow_reader_keeps_nobody_waiting_and_misses_nothing(folder, expected, kind):
    async def main():
        async with opened(folder) as llm:
            slow = llm.generate("slow", LONG, output_kind=kind)
            await slow.start()
            seen = [await slow.__anext__()]
            assert (await read(llm.generate("Tell me", GREEDY)))[-1].outputs[0].token_ids == expected["Tell me"]
            await idle(llm)
            assert len(slow._mailbox._unread) <= 65
            seen += await read(slow)
            assert len(seen) <= 1 + _SLIGHTLY_LATE
            last = join_deltas(seen) if kind == "delta" else seen[-1]
            assert len(last.outputs[0].token_ids) == 400
            assert last.outputs[0].text == llm.get_tokenizer().decode(last.outputs[0].token_ids)

    asyncio.run(main())


def test_a_loop_that_is_gone_is_no_reader(folder):
    """Its request ends at the next output."""
    llm = AsyncLLM(str(folder), **settings())
    left = []

    async def main():
        stream = llm.generate("x", LONG, output_kind="delta")
        await stream.start()
        left.append(stream)

    go = held(llm)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    go.set()
    asyncio.run(idle(llm))
    assert llm.engine.scheduler.counters.tokens_generated < 400
    llm.close()


def test_a_huge_prompt_stalls_neither_the_loop_nor_a_stream(folder, monkeypatch):
    """U43: while it is tokenized, in a thread of its own, the loop goes round and the engine steps."""

    async def main():
        async with opened(folder) as llm:
            llm.get_tokenizer().max_tokens = None  # it would be refused without being tokenized
            encode, spans, beats, steps = llm.get_tokenizer().encode, [], [], []

            def watched(text):
                assert threading.current_thread().name.startswith("vtoken-tokenizer")
                started = time.monotonic()
                token_ids = encode(text)
                spans.append((started, time.monotonic()))
                return token_ids

            async def beat():
                while True:
                    beats.append(time.monotonic())
                    await asyncio.sleep(0.005)

            monkeypatch.setattr(llm.get_tokenizer(), "encode", watched)
            llm.add_step_listener(lambda engine, outputs: steps.append(time.monotonic()))
            beating = asyncio.create_task(beat())
            async with llm.generate([1], LONG, output_kind="delta") as running:
                await running.__anext__()
                with pytest.raises(RequestError, match="leave no room"):
                    await read(llm.generate("x y " * 200_000, GREEDY))
            beating.cancel()
            [(started, ended)] = spans
            for times in (beats, steps):
                assert sum(started < moment < ended for moment in times) >= 5

    asyncio.run(main())


def test_an_engine_that_dies_tells_everybody(folder, monkeypatch, caplog):
    """U17: pending calls get an error, not silence."""

    async def main():
        async with opened(folder) as llm:
            streams = [llm.generate(f"number {i}", LONG) for i in range(4)]
            for stream in streams:
                await stream.start()
            await streams[0].__anext__()
            go = held(llm)
            waiting = [asyncio.create_task(read(stream)) for stream in streams]
            inboxed = asyncio.create_task(read(llm.generate("late", LONG)))
            asked = asyncio.create_task(llm.run_in_engine(lambda engine: engine.stats()))
            await asyncio.sleep(0.05)
            monkeypatch.setattr(llm.engine, "_report", lambda *_: 1 / 0)
            go.set()
            for result in await asyncio.gather(*waiting, inboxed, return_exceptions=True):
                assert isinstance(result, EngineError)
                assert "the engine has died" in str(result)
                assert "ZeroDivisionError" in str(result)
            await asyncio.wait([asked])
            assert not llm.is_alive
            await until(lambda: llm.last_step_age == 0)
            for ask in (llm.stats(), llm.abort("x")):
                with pytest.raises(EngineError, match="the engine has died"):
                    await ask
            with pytest.raises(EngineError, match="the engine has died"):
                llm.generate("x", GREEDY)
            await until(lambda: llm.engine.executor.store.nbytes == 0)

    with caplog.at_level(logging.CRITICAL, "vtoken"):
        asyncio.run(main())
    assert "the engine has died" in caplog.text


def test_a_step_that_hangs_shows_in_its_age(folder, monkeypatch):
    """U17: the age grows while work waits, and is back to nothing after it."""

    async def main():
        async with opened(folder) as llm:
            assert llm.last_step_age == 0
            go = threading.Event()
            execute = llm.engine.executor.execute
            monkeypatch.setattr(llm.engine.executor, "execute", lambda plan: go.wait(20) and execute(plan))
            reader = asyncio.create_task(read(llm.generate("x", GREEDY)))
            await until(lambda: llm.last_step_age > 0.1)
            assert llm.is_alive
            go.set()
            await reader
            await until(lambda: llm.last_step_age == 0)

    asyncio.run(main())


def test_a_failed_request_ends_with_its_error_and_the_others_go_on(folder, expected, monkeypatch):
    async def main():
        async with opened(folder) as llm:
            execute = llm.engine.executor.execute

            def failing(plan):
                if 7 in plan.token_ids:
                    raise RuntimeError("no luck")
                return execute(plan)

            monkeypatch.setattr(llm.engine.executor, "execute", failing)
            fine = asyncio.create_task(read(llm.generate("Tell me", GREEDY)))
            seen = await read(llm.generate([7] * 20, GREEDY))
            assert seen[-1].outputs[0].finish_reason == "error"
            assert "no luck" in seen[-1].error
            assert (await fine)[-1].outputs[0].token_ids == expected["Tell me"]

    asyncio.run(main())


def test_listeners_hear_of_every_step_and_may_fail(folder, caplog):
    async def main():
        async with opened(folder) as llm:
            finished, steps = [], []

            def listener(engine, outputs):
                assert threading.current_thread().name == "vtoken-engine"
                steps.append(engine.stats().scheduler.steps)
                finished.extend(output.request_id for output in outputs if output.finished)

            llm.add_step_listener(lambda engine, outputs: 1 / 0)
            llm.add_step_listener(listener)
            await read(llm.generate("x", GREEDY, "a", output_kind="final"))
            await idle(llm)
            assert finished == ["a"]
            assert steps == list(range(1, 11))

    asyncio.run(main())
    assert caplog.text.count("a step listener failed") == 1


def test_an_idle_engine_sleeps(folder):
    async def main():
        async with opened(folder) as llm:
            await read(llm.generate("x", GREEDY))
            await idle(llm)
            before = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - before < 0.1

    asyncio.run(main())
