"""OpenAI's own client talks to the server, and finds every field where it expects it."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.server.serving import MODEL

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def strictly(model_type, found):
    """The client itself takes anything; its models, asked to be strict, do not."""
    return model_type.model_validate_json(found.model_dump_json(exclude_unset=True), strict=True)


def test_completions(client):
    asked = {"model": MODEL, "prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 5, "logprobs": 2, "seed": 1}
    strictly(Completion, client.completions.create(**asked))
    # With echo the first token has no score, for which there is null, as from OpenAI, whose own types forget it.
    found = client.completions.create(**asked, echo=True)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    parts = list(client.completions.create(**asked, echo=True, stream=True))
    texts = ["".join(c.text for part in parts for c in part.choices if c.index == i) for i in range(4)]
    assert texts == [choice.text for choice in found.choices]


def test_chats(client):
    more = {"kv_policy": "h2o", "kv_budget": 64, "kv_pin": "system", "top_k": 20, "min_p": 0.01, "ignore_eos": True}
    asked = {"model": MODEL, "messages": MESSAGES, "n": 2, "seed": 5, "max_completion_tokens": 20, "extra_body": more}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    strictly(ChatCompletion, found)
    assert all(len(choice.logprobs.content) == 20 for choice in found.choices)
    assert found.usage.evicted_tokens == 0
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40
    for choice in found.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert mine[0].delta.role == "assistant"
        assert [part.finish_reason for part in mine if part.finish_reason] == ["length"]


def test_a_schema_from_a_type(client):
    class Answer(BaseModel):
        yes: bool

    asked = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 60,
        "temperature": 0,
        "logit_bias": dict.fromkeys(("9", "10", "13", "32"), -100),
    }
    found = client.chat.completions.parse(**asked, response_format=Answer, extra_body={"min_tokens": 0})
    assert isinstance(found.choices[0].message.parsed, Answer)


def test_errors_have_their_classes(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 1024


def test_many_at_once(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [client.completions.create(model=MODEL, prompt=f"number {i}", max_tokens=8) for i in range(30)]
            return await asyncio.gather(*asked)

    assert all(found.choices[0].finish_reason for found in asyncio.run(main()))


def test_u53_bodies_of_benchmark_tools(server):
    """guidellm's probe, as it sends it; ignore_eos is exact."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    probe = {
        "prompt": "Test connection",
        "stream_options": options,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stop": None,
        "ignore_eos": True,
    }
    events = server.stream("/v1/completions", probe)
    assert events[-2]["usage"]["completion_tokens"] == 1
    assert all(event["object"] == "text_completion" for event in events[:-1])
    whole = server.complete(prompt="x", max_tokens=64, ignore_eos=True, repetition_penalty=1.0, top_p=1, best_of=1)
    assert whole["usage"]["completion_tokens"] == 64
