"""`/metrics` tells what happened: every number is held against a plain recount."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from tests.driving import StepFailure
from tests.server.metered import BLOCK_BYTES, SIZE, by, load, make_engine, read, value
from tests.server.serving import error_of, serve
from vtoken import AsyncLLM, ConfigError, QueueFullError, SamplingParams
from vtoken.server.app import create_app
from vtoken.server.metrics import Metrics, metrics_router
from vtoken.server.run import _close
from vtoken.server.settings import ServerSettings
from vtoken.server.state import ServerState

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@contextmanager
def opened(engine, **settings):
    llm = AsyncLLM.from_engine(engine)
    try:
        yield llm, Metrics(llm, model_name="m", **settings)
    finally:
        llm.close()


async def answer(llm, ask, seen, abort_after=None):
    """Read an answer; leave it after some outputs if told to. `seen` gets the last output."""
    async with llm.generate(ask.prompt, ask.params, str(ask.number)) as stream:
        async for output in stream:
            seen[ask.number] = output
            if abort_after is not None and len(output.outputs[0].token_ids) >= abort_after:
                await llm.abort(str(ask.number))
                abort_after = None


def counters_of(samples):
    """All that may only grow: counters, and the buckets, counts and sums of histograms."""
    ends = ("_total", "_bucket", "_count", "_sum")
    return {sample: number for sample, number in samples.items() if sample[0].endswith(ends)}


# --- values -----------------------------------------------------------------------------------------------------------

POOLS = {
    "recompute": {"num_blocks": 30},
    "swap": {"num_blocks": 30, "num_host_blocks": 30},
    "evict": {"num_blocks": 30, "evicts": True},
    "evict beside": {"num_blocks": 30, "evicts": True, "kv_copies": "beside"},
    "preempt first": {"num_blocks": 30, "evicts": True, "on_pressure": "preempt"},
    "room": {"num_blocks": 1000},
}


@pytest.mark.parametrize("pool", POOLS)
def test_u52_values_are_those_of_a_plain_recount(pool):
    engine = make_engine(**POOLS[pool])
    failing = {3, 11}

    def before(plan):  # a step in which a request runs alone, and fails: that request's fault
        ran = {engine.scheduler._state.of(lane).request.request_id for lane in plan.lanes.tolist()}
        if {int(request_id) for request_id in ran} & failing:
            raise StepFailure

    engine.executor.before = before
    asks, seen = load(40), {}
    with opened(engine) as (llm, metrics):

        async def main():
            await asyncio.gather(*(answer(llm, ask, seen, 2 if ask.number % 7 == 0 else None) for ask in asks))

        asyncio.run(main())
        samples = read(metrics.render()[0])

    ends = Counter()
    for output in seen.values():
        reasons = {choice.finish_reason for choice in output.outputs}
        ends[next((bad for bad in ("abort", "error") if bad in reasons), "whole")] += 1
    told = by(samples, "request_success_total", "finished_reason")
    assert sum(told.values()) == 40
    assert (told["abort"], told["error"]) == (ends["abort"], ends["error"])
    assert ends["error"] == 2
    assert ends["abort"] > 0
    assert told["stop"] + told["length"] == ends["whole"]

    whole = [
        (asks[number], output)
        for number, output in seen.items()
        if output.outputs[0].finish_reason in ("stop", "length")
    ]
    whole = [(ask, output) for ask, output in whole if output.error is None]
    drawn = sum(len(choice.token_ids) for output in seen.values() for choice in output.outputs)
    assert value(samples, "generation_tokens_total") == drawn
    assert value(samples, "request_prompt_tokens_count") == len(whole)
    assert value(samples, "request_prompt_tokens_sum") == sum(len(ask.prompt) for ask, _ in whole)
    lengths = [[len(choice.token_ids) for choice in output.outputs] for _, output in whole]
    assert value(samples, "request_generation_tokens_sum") == sum(map(sum, lengths))
    assert value(samples, "request_max_num_generation_tokens_sum") == sum(map(max, lengths))
    assert value(samples, "request_params_n_sum") == sum(ask.params.n for ask, _ in whole)
    assert value(samples, "request_params_max_tokens_sum") == sum(ask.params.max_tokens for ask, _ in whole)
    assert value(samples, "request_evicted_tokens_sum") == sum(
        choice.num_evicted for _, output in whole for choice in output.outputs
    )
    for name in ("e2e_request_latency_seconds", "request_prefill_kv_computed_tokens"):
        assert value(samples, f"{name}_count") == len(whole)
    begun = [output for output in seen.values() if any(choice.token_ids for choice in output.outputs)]
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time", "request_inference_time"):
        assert value(samples, f"{name}_seconds_count") == len(begun)
    assert value(samples, "prompt_tokens_total") == sum(len(output.prompt_token_ids) for output in begun)
    sources = by(samples, "prompt_tokens_by_source_total", "source")
    assert sources["local_cache_hit"] == sum(output.num_cached_tokens for output in begun)
    assert sum(sources.values()) == value(samples, "prompt_tokens_total")
    assert value(samples, "request_queue_time_seconds_count") == sum(
        output.metrics is not None and output.metrics.first_scheduled_time is not None for output in seen.values()
    )
    # The tokens of a choice lie one gap apart; none stands before the first.
    gaps = sum(max(0, len(choice.token_ids) - 1) for output in seen.values() for choice in output.outputs)
    assert value(samples, "inter_token_latency_seconds_count") == gaps

    steps = [count for count in engine.executor.tokens_of_steps if count]
    assert value(samples, "iteration_tokens_total_sum") == sum(steps) == value(samples, "tokens_computed_total")
    assert value(samples, "iteration_tokens_total_count") == len(steps)
    assert value(samples, "iteration_tokens_total_bucket", le="8.0") == sum(count <= 8 for count in steps)
    assert value(samples, "failed_steps_total") > 0
    preemptions = sum(0 if output.metrics is None else output.metrics.num_preemptions for output in seen.values())
    assert value(samples, "num_preemptions_total") == preemptions
    assert sum(by(samples, "preemptions_by_mode_total", "mode").values()) == preemptions

    copies = engine.executor.inner.copy_counts()
    assert by(samples, "copies_total", "kind") == {kind.value: n for kind, n in copies.num_copies.items()}
    relocated = by(samples, "copied_bytes_total", "kind")["relocate"]
    climbs, blocks = by(samples, "ladder_climbs_total", "rung"), by(samples, "ladder_blocks_total", "rung")
    if pool == "room":
        assert set(climbs.values()) == set(blocks.values()) == {0.0}
    else:
        assert climbs["preempt"] > 0
        assert blocks["preempt"] > 0
    if pool == "swap":
        assert by(samples, "preemptions_by_mode_total", "mode")["swap"] > 0
    if pool == "preempt first":  # each alone fits
        assert climbs["evict"] == relocated == 0
    elif "evicts" in POOLS[pool]:
        assert relocated > 0
        # A cell of the executor is a number of 8 bytes. Steps that were made to fail have copied nothing.
        assert 0 < relocated <= 8 * value(samples, "tokens_relocated_total")
        assert climbs["evict"] > 0
        assert blocks["drain" if pool == "evict beside" else "evict"] > 0
        assert by(samples, "tokens_evicted_total", "trigger")["pressure"] > 0
        assert by(samples, "reclaim_decisions_total", "verdict")["packed"] > 0


@pytest.mark.parametrize("evicts", [False, True])
def test_u52_memory_is_what_a_walk_over_the_books_finds(evicts):
    engine = make_engine(30, evicts=evicts, kv_copies="beside" if evicts else "ordered")
    with opened(engine) as (llm, metrics):
        seen, pages = {}, []

        def look(engine):
            """In the engine's thread, so that page and walk are of one moment."""
            metrics._recorder.take(engine)
            memory = engine.scheduler.memory
            state = Counter()
            live = {}  # block -> cells that somebody reads
            used = {}  # block -> cells up to the last used one
            retained = floor = 0
            for lane in memory.used_lanes:
                own = 0
                for block in memory.table(lane):
                    cells = {r % SIZE for r in memory.blocks.live_rows(lane).tolist() if r // SIZE == block.entry}
                    live.setdefault(block.block, set()).update(cells)
                    end = min(SIZE, max(0, int(memory.tokens.num_rows[lane]) - block.entry * SIZE))
                    used[block.block] = max(used.get(block.block, 0), end)
                    if block.refs == 1:
                        retained += 1
                        own += block.filled
                floor += -(-own // SIZE)
            for block in range(30):
                if memory.pool.refs[block]:
                    state["held"] += 1
                elif block in memory.prefix.cached_blocks:
                    state["cached"] += 1
                elif memory.pool.pins[block]:
                    state["pinned"] += 1
                else:
                    state["free"] += 1
            pages.append((state, live, used, retained, floor, len(memory.moves), read(metrics_text())))

        def metrics_text():
            asked, metrics._look = metrics._look, lambda: None  # what was taken just now
            try:
                return metrics.render()[0]
            finally:
                metrics._look = asked

        llm.add_step_listener(
            lambda engine, outputs: len(pages) < 60 and engine.scheduler.counters.steps % 3 == 0 and look(engine)
        )

        async def main():
            await asyncio.gather(*(answer(llm, ask, seen) for ask in load(20)))

        asyncio.run(main())
    assert len(pages) > 20
    for state, live, used, retained, floor, pending, samples in pages:
        blocks, cells = by(samples, "kv_blocks", "state"), by(samples, "kv_cells", "state")
        assert blocks == {kind: state[kind] for kind in ("free", "held", "cached", "pinned")}
        assert sum(cells.values()) == 30 * SIZE
        num_live = sum(map(len, live.values()))
        assert cells["live"] == num_live
        assert cells["hole"] == sum(used.values()) - num_live
        assert cells["tail_slack"] == state["held"] * SIZE - sum(used.values())
        assert value(samples, "kv_blocks_partly_used") == sum(0 < len(found) < SIZE for found in live.values())
        assert value(samples, "kv_blocks_retained") == retained
        assert value(samples, "kv_blocks_floor") == floor
        assert value(samples, "copies_pending") == pending
        assert value(samples, "kv_cache_usage_perc") == pytest.approx((state["held"] + state["pinned"]) / 30)
        waiting = by(samples, "num_requests_waiting_by_reason", "reason")
        assert sum(waiting.values()) == value(samples, "num_requests_waiting")
    assert any(by(page[-1], "kv_cells", "state")["hole"] for page in pages) == evicts
    reasons = [by(page[-1], "num_requests_waiting_by_reason", "reason") for page in pages]
    assert any(reason["blocks"] or reason["max_num_seqs"] for reason in reasons)


def test_what_waiting_requests_wait_for():
    with opened(make_engine(300, max_num_seqs=2)) as (llm, metrics):
        assert _reasons_at_step(llm, metrics, 4)["max_num_seqs"] == 4
    with opened(make_engine(30)) as (llm, metrics):  # six texts of 60 tokens in room for 120
        reasons = _reasons_at_step(llm, metrics, 6)
        assert reasons["blocks"] > 0
        assert reasons["blocks"] + reasons["preempted"] == sum(reasons.values())


def _reasons_at_step(llm, metrics, step):
    found = {}

    def look(engine, outputs):
        if engine.scheduler.counters.steps == step:
            found.update({str(k): v for k, v in engine.stats().waiting_by_reason.items()})

    llm.add_step_listener(look)

    async def main():
        streams = [llm.generate([i + 9] * 40, GREEDY.replace(max_tokens=20), str(i)) for i in range(6)]
        await llm.run_in_engine(lambda engine: [engine.add(stream._check()) for stream in streams])
        while await llm.run_in_engine(lambda engine: engine.has_unfinished_requests()):
            await asyncio.sleep(0.001)

    asyncio.run(main())
    return found


def test_who_was_refused_and_who_left_before_he_was_seen():
    engine, gate = make_engine(), threading.Event()
    engine.executor.before = lambda plan: gate.wait(10)
    llm = AsyncLLM.from_engine(engine, max_queued_requests=2)
    metrics = Metrics(llm, wait=0.01)

    async def main():
        streams = [llm.generate([9, 8], GREEDY, str(i)) for i in range(2)]
        for stream in streams:
            await stream.start()
        with pytest.raises(QueueFullError):
            await llm.generate([9, 8], GREEDY).start()
        await streams[1].aclose()  # it may wait for the step that hangs, unseen
        gate.set()
        async for _ in streams[0]:
            pass

    asyncio.run(main())
    samples = read(metrics.render()[0])
    llm.close()
    assert value(samples, "requests_refused_total") == 1
    assert by(samples, "request_success_total", "finished_reason") == {"stop": 0, "length": 1, "abort": 1, "error": 0}


# --- counters only grow -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["swap", "evict beside", "preempt first"])
def test_u52_counters_only_grow_under_random_loads(pool):
    engine = make_engine(**POOLS[pool])
    with opened(engine) as (llm, metrics):
        last = {}

        async def look(is_over):
            nonlocal last
            while not is_over():
                samples = read((await asyncio.to_thread(metrics.render))[0])
                assert sum(by(samples, "kv_blocks", "state").values()) == 30
                assert sum(by(samples, "kv_cells", "state").values()) == 30 * SIZE
                now = counters_of(samples)
                assert now.keys() >= last.keys()
                assert all(now[sample] >= before for sample, before in last.items())
                last = now

        async def main():
            for seed in range(3):
                asks, seen = load(25, seed), {}
                answers = asyncio.gather(*(answer(llm, ask, seen, 3 if ask.number % 4 == 0 else None) for ask in asks))
                await asyncio.gather(look(answers.done), answers)

        asyncio.run(main())
    assert last["vtoken:steps_total", frozenset()] > 50


# --- an engine that does not answer -----------------------------------------------------------------------------------


def test_a_step_that_hangs_holds_nobody_up():
    engine, gate, hangs = make_engine(), threading.Event(), threading.Event()

    def before(plan):
        if plan.step == 5:
            hangs.set()
            gate.wait(30)

    engine.executor.before = before
    with opened(engine, wait=0.05) as (llm, metrics):

        async def main():
            task = asyncio.create_task(answer(llm, load(1)[0], {}))
            await asyncio.to_thread(hangs.wait, 10)
            started = time.monotonic()
            pages = [read((await asyncio.to_thread(metrics.render))[0]) for _ in range(5)]
            assert time.monotonic() - started < 5 * 0.05 + 2
            assert llm._thread._inbox.qsize() <= 1  # they have all asked once, together
            assert {value(page, "engine_alive") for page in pages} == {1}
            ages = [value(page, "snapshot_age_seconds") for page in pages]
            assert ages == sorted(set(ages))
            assert value(pages[-1], "last_step_age_seconds") > 0.1
            assert {value(page, "steps_total") for page in pages} <= set(range(5))
            gate.set()
            await task

        try:
            asyncio.run(main())
        finally:
            gate.set()
        page = read(metrics.render()[0])
        assert value(page, "snapshot_age_seconds") < 1
        assert value(page, "last_step_age_seconds") == 0
        assert value(page, "steps_total") > 5


def test_an_engine_that_hangs_from_the_start_has_names_but_no_numbers():
    engine, gate = make_engine(), threading.Event()
    llm = AsyncLLM.from_engine(engine)
    llm.call_in_engine(lambda engine: gate.wait(30))
    try:
        text = Metrics(llm, wait=0.01).render()[0]
        assert b"# TYPE vtoken:num_requests_running gauge" in text
        assert read(text) == {}
    finally:
        gate.set()
        llm.close()


def test_an_engine_that_has_died_or_was_closed_is_told_as_it_was_last(monkeypatch):
    with opened(make_engine()) as (llm, metrics):
        asyncio.run(answer(llm, load(1)[0], {}))
        before = counters_of(read(metrics.render()[0]))
        monkeypatch.setattr(llm.engine, "advance", lambda: 1 / 0)
        with pytest.raises(Exception, match="has died"):
            asyncio.run(answer(llm, load(1)[0], {}))
        samples = read(metrics.render()[0])
        assert counters_of(samples) == before
        assert value(samples, "engine_alive") == 0
    llm = AsyncLLM.from_engine(make_engine())
    metrics = Metrics(llm)
    llm.close()
    assert value(read(metrics.render()[0]), "engine_alive") == 0


def test_whoever_forgets_the_engine_need_not_close_it_first():
    llm = AsyncLLM.from_engine(make_engine())
    metrics, thread, gone = Metrics(llm), llm._thread._thread, weakref.ref(llm)
    metrics.render()
    del llm, metrics
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_route_shows_the_forms_that_prometheus_asks_for():
    with opened(make_engine(), prefix="vllm:") as (_, metrics):
        app = FastAPI()
        app.include_router(metrics_router(metrics))
        client = TestClient(app)
        plain = client.get("/metrics")
        assert plain.status_code == 200
        assert plain.headers["content-type"].startswith("text/plain; version=")
        assert value(read(plain.content), "num_requests_running", "vllm:") == 0
        newest = (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
            "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4"
        )
        for accept in ("application/openmetrics-text; version=1.0.0", newest):
            shown = client.get("/metrics", headers={"accept": accept})
            assert shown.headers["content-type"].startswith("application/openmetrics-text")
            families = {family.name: family for family in parse_openmetrics(shown.text)}
            assert families["vllm:generation_tokens"].type == "counter"
        assert client.post("/metrics").status_code == 405


def test_labels_say_which_model():
    with opened(make_engine()) as (_, metrics):
        text = metrics.render()[0].decode()
    assert 'vtoken:num_requests_running{engine="0",model_name="m"} 0.0' in text
    assert (
        f'vtoken:cache_config_info{{block_size="{SIZE}",engine="0",model_name="m",num_cpu_blocks="0",'
        f'num_gpu_blocks="48"}} 1.0'
    ) in text
    assert f'vtoken:kv_block_bytes{{engine="0",model_name="m"}} {float(BLOCK_BYTES)}' in text


def test_a_model_name_may_hold_any_sign():
    llm = AsyncLLM.from_engine(make_engine())
    text = Metrics(llm, model_name='a"b\\c\n{ä}').render()[0].decode()
    llm.close()
    assert 'model_name="a\\"b\\\\c\\n{ä}"' in text


def test_metrics_of_ones_own_stand_beside_them():
    registry = CollectorRegistry()
    Gauge("mine", "My own.", registry=registry).set(3)
    llm = AsyncLLM.from_engine(make_engine())
    metrics = Metrics(llm, registry=registry)
    assert b"mine 3.0" in metrics.render()[0]
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(llm, registry=registry)
    Metrics(llm, "other_", registry=registry)
    llm.close()


@pytest.mark.parametrize("prefix", ["1a", "a-b", "a b", "ä:", 'x"', "a\n"])
def test_a_prefix_with_which_no_name_can_begin_is_refused(prefix):
    llm = AsyncLLM.from_engine(make_engine())
    with pytest.raises(ConfigError, match="metrics_prefix: expected"):
        Metrics(llm, prefix)
    llm.close()


# --- in the server ----------------------------------------------------------------------------------------------------


def test_the_server_shows_them_under_the_prefix_it_was_given(folder):
    with serve(folder, metrics_prefix="vllm:") as served:
        served.complete(prompt="Hello there", max_tokens=5, ignore_eos=True)
        samples = read(served.http.get("/metrics").content)
        assert value(samples, "generation_tokens_total", "vllm:") == 5
        assert value(samples, "prompt_tokens_total", "vllm:") == len(served.llm.get_tokenizer().encode("Hello there"))
        assert value(samples, "request_success_total", "vllm:", finished_reason="length") == 1
        assert value(samples, "time_to_first_token_seconds_count", "vllm:") == 1
        assert 'model_name="tiny"' in served.http.get("/metrics").text
        assert served.http.head("/metrics").status_code == 200
        assert error_of(served.post("/metrics"), 405)


@pytest.mark.parametrize("needs", [True, False])
def test_a_key_is_needed_unless_it_is_said_that_none_is(needs):
    with opened(make_engine()) as (llm, _):
        app = create_app(llm, ServerSettings(api_key="sesame", metrics_need_key=needs))
        client = TestClient(app)
        assert client.get("/metrics").status_code == (401 if needs else 200)
        assert client.get("/metrics", headers={"Authorization": "Bearer sesame"}).status_code == 200
        assert client.get("/version").status_code == 401


def test_a_wrong_prefix_is_refused_with_the_settings():
    with pytest.raises(ConfigError, match="metrics_prefix: expected letters"):
        ServerSettings(metrics_prefix="1:")


def test_advice_is_logged_when_the_server_stops(caplog):
    engine = make_engine(2000)
    for ask in load(30):
        engine.add_request(str(ask.number), ask.prompt, ask.params)
    while engine.has_unfinished_requests():
        engine.step()
    llm = AsyncLLM.from_engine(engine)
    caplog.set_level("INFO", "vtoken.server")
    asyncio.run(_close(ServerState(llm, ServerSettings(), "m")))
    assert "advice: never more than" in caplog.text
