"""Events of streams: what is filled in says the same as what is built, and every event is one line to everybody."""

from __future__ import annotations

import json

import httpx
import pytest
from pydantic import BaseModel

from tests.server.serving import MODEL, Served
from vtoken.server.streaming import Template, event

TEXTS = [
    "",
    "plain",
    'a "quoted" \\ one',
    "\n\r\t\0\x1c\x1f\x7f",
    "é 你好 😀",
    "a\x85b\u2028c\u2029d",
    '"}],"x":"\\u0000',
]


class _Said(BaseModel):
    model: str
    text: str
    end: str | None


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("model", ["tiny", "\0", '"\0"'])
def test_a_template_says_what_the_model_would(model, text):
    filled = Template(lambda text: event(_Said(model=model, text=text, end=None))).fill(text)
    built = event(_Said(model=model, text=text, end=None))
    assert json.loads(filled[6:]) == json.loads(built[6:]) == {"model": model, "text": text, "end": None}
    for sent in (filled, built):
        assert sent.startswith(b"data: ")
        assert sent.endswith(b"\n\n")
        assert len(sent.decode().splitlines()) == 2  # as Unicode has it, the empty one included


@pytest.mark.parametrize(
    "more", [{}, {"stream_options": {"include_usage": True}}, {"n": 3}], ids=["text", "usage", "n"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_filled_in_is_what_a_stream_that_tells_more_has_built(server, path, more):
    """With token ids each event is built anew."""
    asked = {"prompt": "Hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {**asked, "max_tokens": 30, "temperature": 1, "seed": 5, **more}

    def told(**extra):
        """Of each choice: (its text, what else its events have, each once). A late reader gets fewer events."""
        texts: dict[int, str] = {}
        others: dict[int, list] = {}
        for each in server.stream(path, {**body, **extra})[:-1]:
            assert ("usage" in each) == ("stream_options" in more)
            for choice in each["choices"]:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
                choice.get("delta", {}).pop("role", None)  # may come with an event inside a character
                index, text = (
                    choice["index"],
                    choice.pop("text") if "text" in choice else choice["delta"].pop("content"),
                )
                texts[index] = texts.get(index, "") + text
                if choice not in others.setdefault(index, []):
                    others[index].append(choice)
        return texts, others

    assert told() == told(return_token_ids=True)


def test_lines_of_a_stream_are_whole_for_who_splits_them_as_unicode_does(server: Served):
    """The tiny model speaks in bytes: told to say nothing but separators of lines, it does."""
    separators = "\u2028\x85"
    grammar = {"regex": f"({separators[0]}|{separators[1]}){{8}}"}
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 60, "structured_outputs": grammar, "stream": True}
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert len(text) == 8
    assert set(text) <= set(separators)
