"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import pytest

from tests.server.serving import checked, error_of

MAX_MODEL_LEN = 1024  # of the server around the tiny model, each of whose tokens stands for 4 bytes at most
USER = [{"role": "user", "content": "Hi"}]


def test_there_and_back(server):
    told = checked(server.post("/tokenize", {"prompt": "Hé", "return_token_strs": True}))
    assert told["tokens"] == list("Hé".encode())
    assert (told["count"], told["max_model_len"], len(told["token_strs"])) == (3, MAX_MODEL_LEN, 3)
    assert checked(server.post("/detokenize", {"tokens": told["tokens"]})) == {"prompt": "Hé"}
    chat = checked(server.post("/tokenize", {"messages": USER}))["tokens"]
    assert checked(server.post("/detokenize", {"tokens": chat}))["prompt"] == "[user]Hi\n[assistant]"


def test_a_text_beyond_the_longest_sequence_is_counted(server):
    assert checked(server.post("/tokenize", {"prompt": "x" * 1500}))["count"] == 1500


@pytest.mark.parametrize(("field", "wrap"), [("prompt", str), ("messages", lambda text: [USER[0] | {"content": text}])])
def test_a_text_far_beyond_it_is_refused_by_its_length(server, field, wrap):
    """No answer is asked for, so none is spoken of."""
    message = error_of(server.post("/tokenize", {field: wrap("x" * 50_000)}), param=field)["message"]
    assert message.startswith(f"{field}: 500")
    assert "characters are at least 12" in message
    assert message.endswith("which is too much to be tokenized here: a sequence may have 1024 tokens (max_model_len)")
