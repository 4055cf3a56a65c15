"""U06 over HTTP: whatever random clients ask, and however they leave, the server comes back to exactly where it was."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.serving import Served, serve, until
from tests.server.traffic import Ask, draw, play
from vtoken import LLM, SamplingParams
from vtoken.engine.async_llm import RequestStream
from vtoken.engine.mailbox import Mailbox
from vtoken.engine.stats import StepFacts
from vtoken.engine.tracked import Tracked
from vtoken.policies.registry import BUILT_IN
from vtoken.schedule.sequence import FinishReason, Request
from vtoken.server.dashboard.frames import MAX_ENDED, Observer

NUM_BLOCKS = 48
ENGINE = {
    "num_blocks": NUM_BLOCKS,
    "block_size": 8,
    "max_model_len": 256,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 48,
}
PREEMPTION: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "swap_space": "64KiB"},
}
NUM_CLIENTS = 24
GREEDY = "Once upon a time there was a king"


@pytest.mark.parametrize("preemption", [pytest.param("recompute", marks=pytest.mark.slow), "swap"])
def test_u06_a_short_soak(folder: Path, preemption: str) -> None:
    soak(folder, 200, preemption, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", PREEMPTION)
def test_u06_a_long_soak(folder: Path, preemption: str) -> None:
    soak(folder, 5000, preemption, seed=4)


def soak(folder: Path, num_requests: int, preemption: str, seed: int) -> None:
    rng = random.Random(seed)
    asks = [draw(rng) for _ in range(num_requests)]
    expected = _fresh_answer(folder)
    known = {id(each) for each in _of_requests()}  # other tests may have left something in this process
    with _no_complaints() as log, serve(folder, ENGINE | PREEMPTION[preemption]) as server:
        first, rest = asks[: num_requests // 5], asks[num_requests // 5 :]
        outcomes = asyncio.run(play(server.url, first, NUM_CLIENTS))
        until(server.is_idle)
        memory = _resident_bytes()
        outcomes += asyncio.run(play(server.url, rest, NUM_CLIENTS))
        check_baseline(server, known)
        grown = _resident_bytes() - memory
        assert grown < 24 * 2**20, f"{grown / 2**20:.1f} MiB more than after a fifth of the requests"
        check_variety(server, asks, outcomes, preemption)
        assert server.complete(prompt=GREEDY, max_tokens=32, temperature=0)["choices"][0]["text"] == expected
        check_repeated(server, asks)
        check_baseline(server, known)
        gc.collect()
        assert not log, log


def check_baseline(server: Served, known: set[int]) -> None:
    """Nothing of any request is left, in the books or anywhere else. `known` was there before."""
    until(server.is_idle)
    server.ask(lambda engine: engine.scheduler.check())
    stats = server.ask(lambda engine: engine.stats())
    usage = stats.usage
    assert usage.free_blocks + usage.cached_blocks == NUM_BLOCKS
    assert (usage.held_blocks, usage.pinned_blocks, usage.live_tokens) == (0, 0, 0)
    assert stats.free_host_blocks == stats.num_host_blocks
    until(lambda: server.http.get("/load").json() == {"server_load": 0, "queued": 0})
    assert not server.llm._thread._mailboxes
    until(lambda: not server.llm._thread._pending)  # an answer comes before its promise is struck off
    for _ in range(50):  # the last steps of what was left run in other threads
        left = _left_over(known)
        if not left:
            break
        time.sleep(0.05)
    assert not left


def _of_requests() -> list[Any]:
    """Every object that belongs to one request and that something refers to."""
    gc.collect()
    kinds = {Request, Tracked, Mailbox, RequestStream}
    return [each for each in gc.get_objects() if type(each) in kinds]


def _left_over(known: set[int]) -> Counter[str]:
    """What has come since and is still referred to, but for what is remembered on purpose: by dashboards the last
    requests that ended, by engines those of their last step."""
    found, remembered = _of_requests(), set(known)
    for each in gc.get_objects():
        if type(each) is Observer:
            assert len(each.ended) <= MAX_ENDED
            remembered |= {id(request) for request in (*each.ended, *each._seen.values())}
        elif type(each) is StepFacts:
            remembered |= {id(request) for request in (*each.finished, *(drawn.request for drawn in each.drawn))}
    return Counter(type(each).__name__ for each in found if id(each) not in remembered)


def check_variety(server: Served, asks: list[Ask], outcomes: Counter[str], preemption: str) -> None:
    """The soak was one: everything that it is about has happened."""
    num_requests = len(asks)
    assert sum(outcomes.values()) == num_requests
    assert outcomes["refused"] == sum(ask.status != 200 for ask in asks)
    assert outcomes["left"] > num_requests // 20
    asked = {str(ask.body["kv_policy"]).partition(":")[0] for ask in asks if "kv_policy" in ask.body}
    assert asked >= set(BUILT_IN)
    stats = server.ask(lambda engine: engine.stats())
    counters, memory = stats.scheduler, stats.memory
    assert counters.preemptions > num_requests // 100
    assert (counters.preemptions_swap > 0) == (preemption == "swap")
    assert counters.tokens_evicted_at_places > num_requests
    assert counters.tokens_evicted_under_pressure > num_requests // 2
    assert counters.finished[FinishReason.ABORT] > num_requests // 50
    assert counters.finished[FinishReason.ERROR] == counters.failed_steps == counters.given_up == 0
    assert memory.blocks_copied_on_write > num_requests // 10
    assert memory.prefix_hit_tokens > num_requests
    assert memory.blocks_forgotten > num_requests // 10


def check_repeated(server: Served, asks: list[Ask]) -> None:
    """Asked again with nobody beside, a request gets the answer that it got in the crowd."""
    repeatable = [ask for ask in asks if ask.is_repeatable and ask.texts][-40:]
    assert len(repeatable) > 10
    again = [Ask(ask.path, ask.body, ask.kind) for ask in repeatable]
    asyncio.run(play(server.url, again, 1))
    for before, after in zip(repeatable, again, strict=True):
        assert after.texts == before.texts, before.body


def _fresh_answer(folder: Path) -> str:
    with LLM(str(folder), seed=0, **ENGINE) as llm:
        [output] = llm.generate(GREEDY, SamplingParams(max_tokens=32, temperature=0), use_tqdm=False)
        return output.outputs[0].text


def _resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


class _Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def _no_complaints() -> Iterator[list[str]]:
    """What is logged as a warning or worse, by whomever. uvicorn's logger keeps its lines from the root's."""
    handler = _Complaints()
    loggers = [logging.getLogger(name) for name in ("", "uvicorn")]
    for each in loggers:
        each.addHandler(handler)
    try:
        yield handler.lines
    finally:
        for each in loggers:
            each.removeHandler(handler)
