"""`AsyncLLM`: streams, ends in every state, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from vtoken import LLM, AsyncLLM, ConfigError, EngineError, QueueFullError, RequestError, SamplingParams
from vtoken.engine.outputs import join_deltas

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=400)


def settings(**more):
    return {"num_blocks": 64, "max_model_len": 500, "max_num_batched_tokens": 32, "max_num_seqs": 8, "seed": 0} | more


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    prompts = ["Tell me", "once upon a time", *(f"number {i}" for i in range(20))]
    with LLM(str(folder), **settings()) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return {output.prompt: output.outputs[0].token_ids for output in outputs}


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


# --- leaving ----------------------------------------------------------------------------------------------------------


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


def held(llm: AsyncLLM) -> threading.Event:
    """The engine's thread waits until this is set."""
    go, is_there = threading.Event(), threading.Event()
    llm._thread._inbox.put(lambda: (is_there.set(), go.wait(20)))
    is_there.wait(20)
    return go


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


# --- refusals ---------------------------------------------------------------------------------------------------------


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
            assert len(seen) <= 3
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


# --- the end ----------------------------------------------------------------------------------------------------------


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
