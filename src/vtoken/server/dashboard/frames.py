"""`Observer` looks at an engine between two steps; `FrameEncoder` makes JSON of what it saw, small enough to keep."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from vtoken.engine.engine import Engine
from vtoken.engine.stats import EngineStats
from vtoken.memory import bits
from vtoken.memory.block_map import block_map
from vtoken.memory.block_table import EMPTY
from vtoken.schedule.sequence import Request, Status

MAX_WAITING: Final = 100  # requests of the queue that a frame lists; the others it counts
MAX_EVENTS: Final = 200  # events of the decision log that a frame lists; the latest
MAX_ID: Final = 200  # characters of a request's id
MAX_ENDED: Final = 32  # requests that can be looked at after they have ended,
MAX_ENDED_TOKENS: Final = 200_000  # and the tokens of all their texts
FRAMES_A_KEY: Final = 32  # a frame that stands alone, then so many that say what changed

FACTS: Final = ("number", "id", "prompt", "choices", "policy", "budget", "trigger", "arrival")
ROW: Final = ("number", "state", "answer", "live", "evicted", "blocks", "floor", "preemptions", "lanes")
STATES: Final = ("waiting", "running", "preempted", "swapped", "finished")
EVENT: Final = ("step", "decision", "phase", "lane", "tokens", "blocks", "trigger", "verdict")


@dataclass(frozen=True)
class Snapshot:
    """An engine between two steps. Nothing in it changes any more."""

    time: float  # seconds since 1970
    stats: EngineStats
    blocks: NDArray[Any]  # [num_blocks] of `BLOCK`
    facts: list[tuple[Any, ...]]  # of each request as `FACTS` names them: what does not change
    rows: list[tuple[Any, ...]]  # of each request as `ROW` names them, the running ones first
    first_tokens: list[float]  # seconds that requests waited for a first token that came since the last snapshot
    events: list[tuple[Any, ...]]  # of the decision log since the last snapshot, as `EVENT` names them
    num_skipped_events: int


class Observer:
    """Takes snapshots of one engine, in the engine's thread: numpy over blocks, a Python loop over requests only.

    It changes nothing that the engine looks at. It remembers what it has told, and the last requests that ended.
    """

    def __init__(self) -> None:
        self.ended: deque[Request] = deque()
        self._seen: dict[int, Request] = {}  # those of the last snapshot that had not ended, by number
        self._told_first: set[int] = set()  # of those, whose first token was told
        self._num_events = 0

    def look(self, engine: Engine) -> Snapshot:
        """What there is, and what has happened since the last look."""
        requests = _listed(engine)
        now = {request.index: request for request in requests}
        self._remember(now)
        return self._snapshot(engine, requests, self._first_tokens(now), *self._events(engine))

    def peek(self, engine: Engine) -> Snapshot:
        """What there is. The next look tells what it would have told."""
        return self._snapshot(engine, _listed(engine), [], [], 0)

    def _snapshot(
        self,
        engine: Engine,
        requests: list[Request],
        first_tokens: list[float],
        events: list[tuple[Any, ...]],
        num_skipped_events: int,
    ) -> Snapshot:
        return Snapshot(
            time=time.time(),
            stats=engine.stats(),
            blocks=block_map(engine.scheduler.memory),
            facts=[_facts(request) for request in (*requests, *self.ended)],
            rows=[*_rows(engine, requests), *map(_ended_row, self.ended)],
            first_tokens=first_tokens,
            events=events,
            num_skipped_events=num_skipped_events,
        )

    def find(self, engine: Engine, number: int) -> Request | None:
        """A request by its number: one that has not ended, or one of the last that have."""
        scheduler = engine.scheduler
        requests = (*scheduler.running, *scheduler.preempted, *scheduler.waiting, *self._seen.values(), *self.ended)
        return next((request for request in requests if request.index == number), None)

    def _remember(self, now: dict[int, Request]) -> None:
        self.ended.extend(request for number, request in self._seen.items() if number not in now and _is_over(request))
        kept = sum(len(sequence.token_ids) for request in self.ended for sequence in request.sequences)
        while self.ended and (len(self.ended) > MAX_ENDED or kept > MAX_ENDED_TOKENS):
            kept -= sum(len(sequence.token_ids) for sequence in self.ended.popleft().sequences)

    def _first_tokens(self, now: dict[int, Request]) -> list[float]:
        waits = []
        for number, request in {**self._seen, **now}.items():
            if request.first_token_time is not None and number not in self._told_first:
                waits.append(request.first_token_time - request.arrival_time)
                self._told_first.add(number)
        self._seen = now
        self._told_first &= now.keys()
        return waits

    def _events(self, engine: Engine) -> tuple[list[tuple[Any, ...]], int]:
        log = engine.scheduler.memory.decisions
        num_new, self._num_events = log.num_events - self._num_events, log.num_events
        events = []
        for event in log.last_events(min(num_new, MAX_EVENTS)):
            decision = log.find(event.decision) if event.phase == "plan" else None
            why = (None, None) if decision is None else (decision.trigger, decision.verdict)
            events.append((event.step, event.decision, event.phase, event.lane, event.tokens, event.blocks, *why))
        return events, num_new - len(events)


def _listed(engine: Engine) -> list[Request]:
    scheduler = engine.scheduler
    return [*scheduler.running, *scheduler.preempted, *islice(scheduler.waiting, MAX_WAITING)]


def _is_over(request: Request) -> bool:
    return request.status is Status.FINISHED


def _facts(request: Request) -> tuple[Any, ...]:
    kept = request.retention
    policy = (None, None, None) if kept is None else (kept.policy.name, kept.budget, kept.trigger)
    prompt, choices = request.num_prompt_tokens, request.params.num_choices
    return request.index, request.request_id[:MAX_ID], prompt, choices, *policy, request.arrival_time


def _rows(engine: Engine, requests: list[Request]) -> Iterator[tuple[Any, ...]]:
    memory = engine.scheduler.memory
    tokens, size, width = memory.tokens, memory.block_size, int(memory.blocks.num_entries.max(initial=0))
    ids, masks = memory.blocks.ids[:, :width], memory.blocks.masks[:, :width]
    # Of all lanes at once; what several choices of a request share is looked at one by one.
    num_live, num_dead = tokens.num_live.tolist(), (tokens.lengths - tokens.num_live).tolist()
    is_held = ids != EMPTY
    is_alone = is_held & (memory.pool.refs[ids] == 1)
    live_alone = np.where(is_alone, bits.count(masks), 0).sum(axis=1)
    floors = (-(-live_alone // size)).tolist()
    num_alone, num_shared = is_alone.sum(axis=1).tolist(), (is_held & ~is_alone).sum(axis=1).tolist()
    for request in requests:
        # Lanes on the host hold blocks of another pool: none of those on the map are theirs.
        lanes = request.lanes if request.status is Status.RUNNING else []
        shared = num_shared[lanes[0]] if len(lanes) == 1 else _distinct(ids[lanes], is_held[lanes] & ~is_alone[lanes])
        yield (
            request.index,
            STATES.index(request.status.value),
            sum(sequence.num_output_tokens for sequence in request.sequences),
            sum(num_live[lane] for lane in request.lanes),
            sum(len(s.died_at) if s.lane is None else num_dead[s.lane] for s in request.sequences),
            shared + sum(num_alone[lane] for lane in lanes),
            shared + sum(floors[lane] for lane in lanes),
            request.num_preemptions,
            lanes,
        )


def _distinct(ids: NDArray[np.int32], some: NDArray[np.bool_]) -> int:
    return len(np.unique(ids[some])) if some.any() else 0


def _ended_row(request: Request) -> tuple[Any, ...]:
    answer = sum(sequence.num_output_tokens for sequence in request.sequences)
    dead = sum(len(sequence.died_at) for sequence in request.sequences)
    length = sum(len(sequence.token_ids) for sequence in request.sequences)
    return request.index, STATES.index("finished"), answer, length - dead, dead, 0, 0, request.num_preemptions, []


@dataclass(frozen=True)
class Frame:
    """A snapshot as JSON. One that `is_key` stands alone, the others say what changed since the frame before."""

    number: int
    is_key: bool
    data: bytes


class FrameEncoder:
    """Numbers frames and leaves out what the frame before has said. Key frames come at fixed numbers."""

    def __init__(self) -> None:
        self.run = uuid4().hex[:8]  # tells the frames of two servers apart
        self._number = 0
        self._blocks: NDArray[Any] | None = None
        self._known: set[int] = set()  # numbers of requests whose facts were told

    def encode(self, snapshot: Snapshot) -> Frame:
        is_key = self._number % FRAMES_A_KEY == 0
        if is_key:
            self._known = set()
        content = {
            "run": self.run,
            "n": self._number,
            "key": is_key,
            "time": round(snapshot.time, 3),
            **_gauges(snapshot),
            "blocks": self._encode_blocks(snapshot.blocks, is_key),
            "facts": [facts for facts in snapshot.facts if facts[0] not in self._known],
            "rows": snapshot.rows,
            "first": [round(seconds, 4) for seconds in snapshot.first_tokens],
            "events": snapshot.events,
            "skipped": snapshot.num_skipped_events,
        }
        self._known = {facts[0] for facts in snapshot.facts}
        frame = Frame(self._number, is_key, json.dumps(content, separators=(",", ":")).encode())
        self._number += 1
        return frame

    def _encode_blocks(self, blocks: NDArray[Any], is_key: bool) -> dict[str, str]:
        before, self._blocks = self._blocks, blocks
        if is_key or before is None:
            return {"all": _base64(blocks)}
        changed = np.flatnonzero(blocks != before)
        return {"at": _base64(changed.astype("<u4")), "cells": _base64(blocks[changed])}


def _base64(array: NDArray[Any]) -> str:
    return b64encode(array.tobytes()).decode()


def _gauges(snapshot: Snapshot) -> dict[str, Any]:
    stats = snapshot.stats
    usage, memory, scheduler = asdict(stats.usage), stats.memory, stats.scheduler
    return {
        "step": scheduler.steps,
        "usage": usage,
        "requests": [stats.num_running, stats.num_waiting, stats.num_preempted],
        "host": [stats.num_host_blocks - stats.free_host_blocks, stats.num_host_blocks],
        "totals": {
            "busy": round(stats.busy_seconds, 4),
            "generated": scheduler.tokens_generated,
            "computed": scheduler.tokens_computed,
            "evicted": memory.tokens_evicted,
            "returned": memory.blocks_reclaimed + memory.blocks_trimmed,
            "packed": memory.blocks_reclaimed_packed,
            "moved": memory.tokens_relocated,
            "preempted": scheduler.preemptions,
            "forgotten": memory.blocks_forgotten,
            "copied": memory.blocks_copied_on_write,
            "finished": sum(scheduler.finished.values()),
        },
    }
