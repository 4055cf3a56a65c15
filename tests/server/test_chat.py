"""`/v1/chat/completions`: messages in, messages out."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.conftest import CHAT_TEMPLATE
from tests.server.serving import MODEL, Served, error_of, serve, until
from tests.tiny_models import BOS, EOS, save_llama
from vtoken import SamplingParams

GREEDY = {"temperature": 0, "ignore_eos": True}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def prompt_of(server: Served, *messages, **body) -> str:
    """The text that a chat makes of messages, by the ids that its answer tells."""
    found = server.chat(*messages, max_tokens=1, return_token_ids=True, **body)
    return bytes(found["prompt_token_ids"]).decode()


def test_the_answer_is_that_of_the_engine(server):
    async def main():
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
        [output] = [output async for output in server.llm.chat([USER], params, output_kind="final")]
        return output.outputs[0].text

    text = asyncio.run(main())
    found = server.chat(USER, max_tokens=12, **GREEDY)
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    [choice] = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert found["usage"]["prompt_tokens"] == len("[user]Hi\n[assistant]")


def test_u69_chunks(server):
    """Same id, created and model; the first delta has the role; one end for each choice; then [DONE]."""
    body = {"messages": [USER], "max_tokens": 20, "n": 2, "seed": 3}
    whole = server.chat(USER, max_tokens=20, n=2, seed=3)
    events = server.stream("/v1/chat/completions", body)
    assert events.pop() == "[DONE]"
    for name in ("id", "created", "model"):
        assert len({event[name] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in part["delta"] for part in mine[1:])
        assert "".join(part["delta"]["content"] for part in mine) == choice["message"]["content"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
    assert all(event["choices"][0]["delta"]["content"] or event["choices"][0]["finish_reason"] for event in events)


@pytest.mark.parametrize("top", [None, 0, 5])
def test_u71_logprobs(server, top):
    """content[] with token, logprob, bytes and top_logprobs[]; streamed parts join to the same."""
    body = {"messages": [USER], "logprobs": True, "top_logprobs": top, "max_tokens": 30, **GREEDY}
    found = server.chat(USER, **{name: value for name, value in body.items() if name != "messages"})
    content = found["choices"][0]["logprobs"]["content"]
    assert len(content) == 30
    for each in content:
        assert each.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(each["top_logprobs"]) == (top or 0)
        if top:
            assert each["top_logprobs"][0]["logprob"] == each["logprob"]  # greedy
            values = [other["logprob"] for other in each["top_logprobs"]]
            assert values == sorted(values, reverse=True)
    text = bytes(byte for each in content for byte in each["bytes"]).decode(errors="replace")
    assert text == found["choices"][0]["message"]["content"]
    events = server.stream("/v1/chat/completions", body)[:-1]
    assert [each for event in events for each in event["choices"][0]["logprobs"]["content"]] == content


def test_u71_what_contradicts(server):
    body = {"model": MODEL, "messages": [USER]}
    error_of(server.post("/v1/chat/completions", {**body, "top_logprobs": 2}), param="top_logprobs")
    error = error_of(
        server.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 50}), param="top_logprobs"
    )
    assert error["message"].startswith("top_logprobs: 50 is more than")
    error_of(server.post("/v1/chat/completions", {**body, "logprobs": 2}), param="logprobs")


def test_u73_content_in_every_form(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of(server, {"role": "user", "content": parts}) == "[user]a\nb\n[assistant]"
    assert prompt_of(server, {"role": "assistant", "content": None}, USER) == "[assistant]\n[user]Hi\n[assistant]"
    assert prompt_of(server, {"role": "user", "content": []}) == "[user]\n[assistant]"
    assert prompt_of(server, {"role": "developer", "content": "x"}, USER).startswith("[system]x")
    assert prompt_of(server, {"role": "tool", "content": "x", "tool_call_id": "1"}, USER).startswith("[tool]x")
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    error_of(server.post("/v1/chat/completions", {"model": MODEL, "messages": [image]}), param="messages")


def test_u75_how_long_answers_are(server):
    """completions 16; chats: the room left; null is the default."""
    for none in ({}, {"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": None}):
        assert server.complete(prompt="x", ignore_eos=True, **none)["usage"]["completion_tokens"] == 16
        almost_full = {"role": "user", "content": "x" * 980}
        assert server.chat(almost_full, ignore_eos=True, **none)["usage"]["total_tokens"] == 1024
    assert server.chat(USER, max_completion_tokens=5, max_tokens=9, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_u87_tools(server):
    told = prompt_of(server, USER, tools=[TOOL], tool_choice="auto")
    assert '[tools][{"type": "function"' in told
    assert prompt_of(server, USER, tools=[TOOL]) == told
    assert "[tools]" not in prompt_of(server, USER, tools=[TOOL], tool_choice="none")
    body = {"model": MODEL, "messages": [USER], "tools": [TOOL]}
    for wrong in ("required", {"type": "function", "function": {"name": "look"}}):
        error_of(server.post("/v1/chat/completions", {**body, "tool_choice": wrong}), param="tool_choice")
    error_of(server.post("/v1/chat/completions", {**body, "tools": ["look"]}), param="tools")


def test_a_last_message_is_gone_on_with(server):
    begun = {"role": "assistant", "content": "The sky"}
    told = prompt_of(server, USER, begun, continue_final_message=True, add_generation_prompt=False)
    assert told == "[user]Hi\n[assistant]The sky"
    body = {"model": MODEL, "messages": [USER, begun], "continue_final_message": True}
    error_of(server.post("/v1/chat/completions", body), param="continue_final_message")


def test_a_template_from_a_request_is_refused(server):
    body = {"model": MODEL, "messages": [USER], "chat_template": "{{ 1 }}"}
    error_of(server.post("/v1/chat/completions", body), param="chat_template")


def test_u74_templates(tmp_path_factory):
    """None: chats are refused with how to give one, completions work; one that throws: 400."""
    folder = save_llama(tmp_path_factory.mktemp("plain"), tokenizer=True, bos_token_id=BOS, eos_token_id=EOS)
    engine = {"max_model_len": 512, "num_blocks": 64}
    with serve(folder, engine) as server:
        error = error_of(server.post("/v1/chat/completions", {"model": MODEL, "messages": [USER]}), param="messages")
        assert "chat_template" in error["message"]
        assert server.complete(prompt="x", max_tokens=1)
        assert server.http.get("/health").status_code == 200
    throwing = CHAT_TEMPLATE + "{% if messages | length > 1 %}{{ raise_exception('only one turn') }}{% endif %}"
    with serve(folder, engine, chat_template=throwing, trust_request_chat_template=True) as server:
        assert prompt_of(server, USER) == "[user]Hi\n[assistant]"
        error = error_of(server.post("/v1/chat/completions", {"model": MODEL, "messages": [USER, USER]}))
        assert "only one turn" in error["message"]
        assert prompt_of(server, USER, chat_template="{{ messages[0].content }}!") == "Hi!"


# --- kv_pin: "system" -------------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be kind and brief, whatever they say."}
LONG = {"role": "user", "content": "x" * 300}
EVICTING = {"kv_policy": "random", "kv_budget": 96, "kv_trigger": "always", "max_tokens": 8}
MERGING = (  # as Llama 2: what the system says stands in the first message of the user
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% if not rest %}{{ raise_exception('no user') }}{% endif %}"
    "{% for m in rest %}[{{ m.role }}]{% if loop.first %}<<{{ system }}>>{% endif %}{{ m.content }}\n{% endfor %}"
)
AT_THE_END = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{{ messages[0].content }}"
)


def deaths(server: Served, *messages, **body) -> tuple[str, set[int]]:
    """The prompt, and the positions in it that died."""
    seen = {}
    server.llm.add_step_listener(
        lambda engine, outputs: [seen.update(last=output) for output in outputs if output.finished]
    )
    server.chat(*messages, **EVICTING, **body)
    until(lambda: "last" in seen)  # listeners hear of it after the client
    output = seen["last"]
    return bytes(output.prompt_token_ids).decode(), set(output.outputs[0].died_at)


@pytest.mark.parametrize("template", [None, MERGING], ids=["own turns", "in the user's turn"])
def test_system_messages_are_pinned(folder, template):
    with serve(folder, chat_template=template) as server:
        prompt, dead = deaths(server, SYSTEM, LONG, kv_pin="system")
        start = prompt.index(SYSTEM["content"])
        assert dead
        assert dead.isdisjoint(range(start, start + len(SYSTEM["content"])))
        _, unpinned = deaths(server, SYSTEM, LONG)
        assert not unpinned.isdisjoint(range(start, start + len(SYSTEM["content"])))


def test_system_messages_in_between_are_pinned(server):
    later = {"role": "system", "content": "But now be rude."}
    prompt, dead = deaths(server, SYSTEM, LONG, later, USER, kv_pin="system")
    for words in (SYSTEM["content"], later["content"]):
        start = prompt.index(words)
        assert dead.isdisjoint(range(start, start + len(words)))
    assert dead


def test_a_pin_that_cannot_be_told(folder):
    with serve(folder, chat_template=AT_THE_END) as server:
        body = {"model": MODEL, "messages": [SYSTEM, USER], **EVICTING, "kv_pin": "system"}
        error = error_of(server.post("/v1/chat/completions", body), param="kv_pin")
        assert "give ranges of positions" in error["message"]
        body["messages"] = [USER]
        assert "there is none" in error_of(server.post("/v1/chat/completions", body), param="kv_pin")["message"]
        body["messages"] = [5]
        error_of(server.post("/v1/chat/completions", body), param="messages")
