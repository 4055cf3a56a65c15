"""Random clients: what they ask, how they leave, and what they make of the answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from tests.engine.test_eviction import POLICIES
from tests.server.serving import MODEL

# It looks back on the queries of one sequence, and beams take over from each other.
_FOR_BEAMS = [policy for policy in POLICIES if not policy.startswith("expected_attention")]
_FORMS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    {"structured_outputs": {"regex": "[ab]{3,20}"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
)
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"

Leaving = Literal["stays", "leaves at a time", "leaves after events"]


@dataclass
class Ask:
    """One request and how its client behaves."""

    path: str
    body: dict[str, Any]
    kind: str  # what is special about it, for counting
    status: int = 200
    leaving: Leaving = "stays"
    patience: float = 0.0  # seconds, or events
    texts: dict[int, str] = field(default_factory=dict)  # by choice: the answer, once it is there

    @property
    def is_repeatable(self) -> bool:
        """Whether its answer depends on nothing but itself. Under pressure it depends on the load, by nature."""
        return self.status == 200 and "seed" in self.body and self.body.get("kv_trigger") != "pressure"


def draw(rng: random.Random) -> Ask:
    """A request that a pool of 48 blocks of 8 tokens can run, or one that is wrong."""
    if rng.random() < 0.06:
        return _wrong(rng)
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randint(1, 40), "temperature": rng.choice((0, 0.7, 1.0))}
    text = "".join(rng.choices("abcdef ghij\n", k=rng.randint(1, 40)))
    shared = rng.choice(("", "You are a helpful assistant. "))  # found in the prefix cache, now and then
    path = rng.choice((_COMPLETIONS, _CHATS))
    if path == _CHATS:
        body["messages"] = [{"role": "user", "content": shared + text}]
    else:
        body["prompt"] = shared + text
    kind = rng.choice(("plain", "plain", "choices", "best", "beams", "scores", "form", "stops", "prompts", "penalties"))
    if kind == "prompts" and path == _COMPLETIONS:
        body["prompt"] = [body["prompt"], text[::-1], [*text.encode()]][: rng.randint(2, 3)]
    body |= _special(kind, path, rng)
    if rng.random() < 0.6:
        policy = rng.choice(_FOR_BEAMS if kind == "beams" else POLICIES)
        budget = rng.choice((24, 40, 0.8 if len(text) >= 30 else 24))  # what policies protect is 24 at most
        body |= {"kv_policy": policy, "kv_budget": budget, "kv_stride": 16, "kv_prefill_stride": 32}
        body["kv_trigger"] = rng.choice(("pressure", "always"))
    if kind != "form" and rng.random() < 0.5:  # a form ends where it is complete
        body["ignore_eos"] = True
    if rng.random() < 0.5:
        body["seed"] = rng.randrange(2**31)
    ask = Ask(path, body, kind)
    if rng.random() < 0.5:
        body["stream"] = True
        if rng.random() < 0.3:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
    dice = rng.random()
    if dice < 0.15:
        ask.leaving, ask.patience = "leaves at a time", rng.expovariate(10)
    elif dice < 0.3 and body.get("stream"):
        ask.leaving, ask.patience = "leaves after events", rng.randint(0, 12)
    return ask


def _special(kind: str, path: str, rng: random.Random) -> dict[str, Any]:
    match kind:
        case "choices":
            return {"n": rng.randint(2, 3)}
        case "best":
            return {"n": rng.randint(1, 2), "best_of": 3}
        case "beams":
            return {"n": rng.randint(1, 2), "best_of": 3, "use_beam_search": True, "temperature": 0}
        case "scores" if path == _CHATS:
            return {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
        case "scores":
            return {"logprobs": rng.randint(0, 3), "echo": rng.random() < 0.3}
        case "form":
            return rng.choice(_FORMS)
        case "stops":
            return {"stop": rng.sample("abcdefgh", 3), "min_tokens": 1}
        case "penalties":
            return {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {"97": 3}, "top_p": 0.9}
    return {}


def _wrong(rng: random.Random) -> Ask:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4}
    wrong: list[tuple[dict[str, Any], int]] = [
        ({"model": "another"}, 404),
        ({"temperature": -1}, 400),
        ({"n": 0}, 400),
        ({"prompt": "x" * 2000}, 400),
        ({"prompt": [[1, 2], [10**6]]}, 400),  # the second of two: the first must not stay behind
        ({"kv_policy": "no_such_policy", "kv_budget": 8}, 400),
        ({"kv_policy": "h2o", "kv_budget": 1, "kv_pin": [[0, 2000]]}, 400),
        ({"structured_outputs": {"regex": "("}}, 400),
        ({"use_beam_search": True, "best_of": 3, "stop": "a"}, 400),
        ({"best_of": 400}, 400),
    ]
    changed, status = rng.choice(wrong)
    body |= changed
    if rng.random() < 0.5:
        body["stream"] = True
    return Ask(_COMPLETIONS, body, "wrong", status)


async def send(client: httpx.AsyncClient, ask: Ask) -> str:
    """What came of it: "answered", "refused" or "left". Raises AssertionError for anything unexpected."""
    try:
        async with asyncio.timeout(ask.patience if ask.leaving == "leaves at a time" else 120):
            return await _send(client, ask)
    except TimeoutError:
        assert ask.leaving == "leaves at a time", f"no answer to {ask.body}"
        return "left"


async def _send(client: httpx.AsyncClient, ask: Ask) -> str:
    if not ask.body.get("stream") or ask.status != 200:
        response = await client.post(ask.path, json=ask.body)
        assert response.status_code == ask.status, (ask.body, response.text)
        if ask.status != 200:
            assert response.json().keys() == {"error"}
            return "refused"
        for choice in response.json()["choices"]:
            assert choice["finish_reason"] in ("stop", "length")
            ask.texts[choice["index"]] = choice["text"] if "text" in choice else choice["message"]["content"]
        return "answered"
    texts: dict[int, str] = {}
    ends: Counter[int] = Counter()
    num_events = 0
    last = ""
    async with client.stream("POST", ask.path, json=ask.body) as response:
        assert response.status_code == 200, (ask.body, (await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line:
                continue
            if ask.leaving == "leaves after events" and num_events >= ask.patience:
                return "left"
            assert line.startswith("data: "), line
            num_events, last = num_events + 1, line[6:]
            if last == "[DONE]":
                continue
            event = json.loads(last)
            assert "error" not in event, (ask.body, event)
            for choice in event["choices"]:
                index = choice["index"]
                assert not ends[index], "a choice went on after its end"
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                texts[index] = texts.get(index, "") + (text or "")
                ends[index] += choice["finish_reason"] is not None
    assert last == "[DONE]"
    assert ends.keys() == texts.keys() == set(range(len(ends)))
    assert set(ends.values()) == {1}
    ask.texts = texts
    return "answered"


async def play(url: str, asks: list[Ask], num_clients: int) -> Counter[str]:
    """Send all, `num_clients` at a time. What came of them, counted."""
    outcomes: Counter[str] = Counter()
    queue = iter(asks)

    async def work(client: httpx.AsyncClient) -> None:
        for ask in queue:
            outcomes[await send(client, ask)] += 1

    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients // 2)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(num_clients):
            tasks.create_task(work(client))
    return outcomes
