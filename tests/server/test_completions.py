"""`/v1/completions`: what goes in and what comes out."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.server.serving import MODEL, Served, error_of
from vtoken import SamplingParams

GREEDY = {"temperature": 0, "ignore_eos": True}


def answer(server: Served, prompt, **params) -> tuple[str, list[int]]:
    """What the engine says by itself."""

    async def main():
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, **params)
        [output] = [output async for output in server.llm.generate(prompt, sampling, output_kind="final")]
        return output.outputs[0].text, output.outputs[0].token_ids

    return asyncio.run(main())


def test_the_answer_is_that_of_the_engine(server):
    text, _ = answer(server, "Once upon", max_tokens=12)
    found = server.complete(prompt="Once upon", max_tokens=12, **GREEDY)
    assert found["object"] == "text_completion"
    assert found["id"].startswith("cmpl-")
    assert found["model"] == MODEL
    [choice] = found["choices"]
    assert choice == {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (9, 12, 21)


def test_a_stream_says_the_same(server):
    text, _ = answer(server, "Once upon", max_tokens=40)
    events = server.stream("/v1/completions", {"prompt": "Once upon", "max_tokens": 40, **GREEDY})
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert "�" not in "".join(event["choices"][0]["text"] for event in events[:-1]).replace("�", "", text.count("�"))
    for name in ("id", "created", "model", "object"):
        assert len({event[name] for event in events[:-1]}) == 1
    assert all("usage" not in event for event in events[:-1])


def test_prompts_in_every_form(server):
    text, _ = answer(server, "Hi", max_tokens=4)
    for prompt in ("Hi", [72, 105], ["Hi"], [[72, 105]]):
        assert [choice["text"] for choice in server.complete(prompt=prompt, max_tokens=4, **GREEDY)["choices"]] == [
            text
        ]
    other, _ = answer(server, "Ho", max_tokens=4)
    found = server.complete(prompt=["Hi", "Ho", [72, 105]], max_tokens=4, **GREEDY)
    assert [choice["text"] for choice in found["choices"]] == [text, other, text]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert found["usage"]["prompt_tokens"] == 6


def test_many_prompts_and_choices_in_a_stream(server):
    """Index = prompt * n + choice; each choice gets its own end."""
    body = {"prompt": ["Hi", "Ho", "Ha"], "n": 2, "seed": 7, "max_tokens": 20, "temperature": 1.0}
    whole = server.complete(**body)
    events = server.stream("/v1/completions", body)
    texts, ends = {}, {}
    for event in events[:-1]:
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in ends
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert sorted(ends) == list(range(6))


def test_echo_and_logprobs(server):
    """U72: all tokens of prompt and answer; the first has no score."""
    body = {"prompt": "The sky", "echo": True, "logprobs": 2, "max_tokens": 3, **GREEDY}
    [choice] = server.complete(**body)["choices"]
    scores = choice["logprobs"]
    assert choice["text"].startswith("The sky")
    assert scores["tokens"][:7] == list("The sky")
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == 10
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert all(math.isfinite(score) and score <= 0 for score in scores["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in scores["top_logprobs"][1:])
    assert scores["text_offset"][:8] == list(range(8))


def test_scoring_only(server):
    """U72: max_tokens 0 is allowed with echo."""
    found = server.complete(prompt="The sky is blue", echo=True, max_tokens=0, logprobs=1)
    [choice] = found["choices"]
    assert choice["text"] == "The sky is blue"
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"] == 15
    assert found["usage"]["completion_tokens"] == 0
    events = server.stream(
        "/v1/completions", {"prompt": "The sky is blue", "echo": True, "max_tokens": 0, "logprobs": 1}
    )
    assert events[0]["choices"][0]["logprobs"] == choice["logprobs"]
    error_of(server.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 0}), param="max_tokens")


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_streamed_scores_join_to_the_whole(server, wanted):
    """U71, U32: also where the prompt is cached."""
    body = {"prompt": "Žluťoučký 🏳️‍🌈", "echo": True, "logprobs": wanted, "max_tokens": 30, **GREEDY}
    [whole] = server.complete(**body)["choices"]
    parts = [event["choices"][0] for event in server.stream("/v1/completions", body)[:-1]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in part["logprobs"][name]] == whole["logprobs"][name], name
    assert server.complete(**body)["choices"][0] == whole


def test_prompt_logprobs_by_token_id(server):
    [choice] = server.complete(prompt="Hi!", prompt_logprobs=1, max_tokens=1)["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["105"]["decoded_token"] == "i"
    assert third["33"]["rank"] >= 1


def test_token_ids_on_demand(server):
    _, token_ids = answer(server, "Hi", max_tokens=5)
    [choice] = server.complete(prompt="Hi", max_tokens=5, return_token_ids=True, **GREEDY)["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (token_ids, [72, 105])
    [choice] = server.complete(prompt="Hi", max_tokens=2, logprobs=0, return_tokens_as_token_ids=True, **GREEDY)[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in token_ids[:2]]


def test_the_fields_of_vllm_reach_the_engine(server):
    forced = server.complete(prompt="Hi", max_tokens=3, logit_bias={"65": 100}, temperature=0)
    assert forced["choices"][0]["text"] == "AAA"
    stopped = server.complete(prompt="Hi", max_tokens=9, allowed_token_ids=[66], stop_token_ids=[66], min_tokens=0)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == 66
    stopped = server.complete(prompt="Hi", max_tokens=9, logit_bias={"65": 100}, stop="AAA", temperature=0)
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["stop_reason"]) == ("", "AAA")
    assert stopped["usage"]["completion_tokens"] == 3
    beams = server.complete(prompt="Hi", max_tokens=4, use_beam_search=True, n=2, best_of=3, length_penalty=0.5)
    assert len(beams["choices"]) == 2
    digits = server.complete(prompt="Hi", max_tokens=9, structured_outputs={"regex": "[0-9]{3}"})
    assert digits["choices"][0]["text"].isdigit()
    chosen = server.complete(prompt="Hi", max_tokens=9, structured_outputs={"choice": ["yes", "no"]})
    assert chosen["choices"][0]["text"] in ("yes", "no")


def test_a_response_format(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = server.complete(prompt="Hi", max_tokens=40, response_format=form, structured_outputs=None, temperature=0)[
        "choices"
    ][0]["text"]
    assert found.strip().startswith("{")
    for wrong in (
        {"type": "xml"},
        {},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 1}},
        "x",
    ):
        body = {"model": MODEL, "prompt": "x", "response_format": wrong}
        error_of(server.post("/v1/completions", body), param="response_format")


def test_what_is_kept_and_evicted_is_told(server):
    """U16, U58."""
    body = {
        "prompt": "x" * 200,
        "max_tokens": 20,
        "kv_policy": "streaming_llm",
        "kv_budget": 64,
        "kv_trigger": "always",
    }
    whole = server.complete(**body, **GREEDY)["usage"]
    assert whole["prompt_tokens"] == 200
    assert whole["evicted_tokens"] > 100
    assert whole["kept_tokens"] + whole["evicted_tokens"] == 220
    events = server.stream("/v1/completions", body | GREEDY | {"stream_options": {"include_usage": True}})
    streamed = events[-2]["usage"]
    assert (streamed["kept_tokens"], streamed["evicted_tokens"]) == (whole["kept_tokens"], whole["evicted_tokens"])
    pinned = server.complete(**body, **GREEDY, kv_pin=[[0, 30]])["usage"]
    assert pinned["kept_tokens"] >= 64
    error_of(server.post("/v1/completions", {"model": MODEL, **body, "kv_pin": "system"}), param="kv_pin")
