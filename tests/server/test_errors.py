"""Bad requests: 400, 404, 405, 413, 415, in OpenAI's shape, and the server lives on."""

from __future__ import annotations

import gzip
import json
import time

import pytest

from tests.server.serving import MODEL, error_of, events_of
from vtoken.server.body import decode
from vtoken.server.errors import ApiError

ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
BASE = {"model": MODEL, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"true", b"1", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": -Infinity}'),
        *(b"[" * 10**5, b'{"a": ' * 10**5, b'{"prompt": ' + b"9" * 5000 + b"}", b'{"a":1}{"a":2}'),
        *(b'{"user": "\\ud800"}', b'{"\\udc00": 1}', b'{"messages": [{"role": "user", "content": "\\udfff"}]}'),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_request(server, route, body):
    """U51, U83."""
    error_of(server.http.post(route, content=body, headers=JSON))


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1, "hot", True, 1e400, 101]),
        ("top_p", [0, 1.5, "x"]),
        ("top_k", [-5, 0.5]),
        ("min_p", [2, -1]),
        ("n", [0, 1.0, "2", 100_000, -1, 2**70]),
        ("max_tokens", [-1, 1.5, 10**30, True]),
        ("max_completion_tokens", [-1, "x"]),
        ("presence_penalty", [99]),
        ("frequency_penalty", [-3]),
        ("repetition_penalty", [0, -1]),
        ("seed", [2**70, 1.5, "x"]),
        ("stop", ["", ["a", ""], [1], 5, ["x"] * 1000]),
        ("stop_token_ids", [[-1], ["a"], [10**6], 5]),
        ("logit_bias", [{"a": 1}, {"1": 101}, {"1": "x"}, {"99999": 1}, [1], {"1": True}, {"-1": 1}]),
        ("prompt_logprobs", [-1, 10**6]),
        ("stream", ["yes", 1]),
        ("stream_options", [{}, 5, {"include_usage": "x"}]),
        ("bad_words", [[""], [5]]),
        ("response_format", ["json", {"type": "x"}, {"type": "json_schema", "json_schema": {}}]),
        ("structured_outputs", [{"regex": "("}, {}, {"x": 1}]),
        ("kv_policy", ["nobody", 5, ""]),
        ("kv_budget", [0, 1.5, "x", True]),
        ("kv_trigger", ["never"]),
        ("kv_pin", [[[5, 1]], [1], "all", [[0, 1, 2]]]),
        ("user", [5, {}]),
        ("cache_salt", [5, ""]),
        ("model", [5, ""]),
    ],
)
def test_wrong_values_are_told_by_name(server, route, field, values):
    """U05, U07, U66, U68."""
    for value in values:
        body = {**BASE, field: value}
        response = server.http.post(route, content=dumps(body), headers=JSON)
        error_of(response, 404 if (field, value) == ("model", "") else 400, field)
    assert server.complete(prompt="x", max_tokens=1)


def dumps(body) -> bytes:
    return json.dumps(body).replace("Infinity", "1e400").encode()


@pytest.mark.parametrize(
    "prompt", [[], [1.5], [-1], [258], [True], [None], {}, 5, True, [["a"]], [[1], ["a"]], [[1.5]]]
)
def test_prompts_that_are_none(server, prompt):
    """U39, U07."""
    error_of(server.post("/v1/completions", {"model": MODEL, "prompt": prompt}), param="prompt")


@pytest.mark.parametrize("prompt", ["", [""], [[]], ["hi", ""]])
def test_an_empty_prompt_is_the_bos_token(server, prompt):
    """U39."""
    assert server.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens"] in (1, 3)


@pytest.mark.parametrize(
    "messages",
    [[], "x", [{}], [5], {}, [{"role": "foo", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}]],
)
def test_messages_that_are_none(server, messages):
    error_of(server.post("/v1/chat/completions", {"model": MODEL, "messages": messages}), param="messages")


def test_missing_fields(server):
    error_of(server.post("/v1/completions", {"prompt": "x"}), param="model")
    error_of(server.post("/v1/completions", {"model": MODEL}), param="prompt")
    error_of(server.post("/v1/chat/completions", {"model": MODEL}), param="messages")


def test_fields_that_clients_always_send_are_taken(server):
    more = {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "whatever": [1],
    }
    nulls = dict.fromkeys(
        ("temperature", "top_p", "stop", "seed", "n", "logit_bias", "user", "stream_options", "tools")
    )
    assert server.complete(prompt="x", max_tokens=1, **more, **nulls)
    assert server.chat(max_tokens=1, **more, **nulls, reasoning_effort="low", modalities=["text"])


def test_routes_methods_and_types(server):
    """U51."""
    assert (
        error_of(server.post("/v1/completions", {"model": "gpt-4", "prompt": "x"}), 404, "model")["code"]
        == "model_not_found"
    )
    error_of(server.post("/v1/nothing", {}), 404)
    error_of(server.http.get("/v1/completions"), 405)
    error_of(server.http.delete("/v1/models"), 405)
    text = server.http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    error_of(text, 415)
    untyped = server.http.build_request(
        "POST", "/v1/completions", content=b'{"model":"tiny","prompt":"x","max_tokens":1}'
    )
    untyped.headers.pop("Content-Type", None)
    assert server.http.send(untyped).status_code == 200
    assert server.http.head("/health").status_code == 200
    assert server.http.head("/v1/models").content == b""
    assert server.http.options("/v1/models").status_code == 204


def test_a_thousand_bad_messages_make_a_short_error(server):
    """U51."""
    error_of(server.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": 5}] * 1000}))


def test_a_prompt_that_is_too_long_names_both_numbers(server):
    """U24."""
    error = error_of(server.post("/v1/completions", {"model": MODEL, "prompt": "x" * 1024}), param="prompt")
    assert "1024" in error["message"]
    assert "1023" in error["message"]
    message = {"role": "user", "content": "x" * 2000}
    error_of(server.post("/v1/chat/completions", {"model": MODEL, "messages": [message]}), param="messages")
    assert server.complete(prompt="x" * 1023, max_tokens=500)["usage"]["completion_tokens"] == 1


def test_a_stream_is_refused_before_it_begins(server):
    """U41."""
    body = {"model": MODEL, "prompt": "x", "stream": True}
    error_of(server.post("/v1/completions", {**body, "n": 0}), param="n")
    error_of(server.post("/v1/completions", {**body, "prompt": "x" * 5000}), param="prompt")
    error_of(server.post("/v1/completions", {**body, "prompt": ["x", [999]]}), param="prompt")


@pytest.mark.parametrize(
    "flood",
    [b"[" + b"[1]," * 2_500_000 + b"1]", b"{" + b",".join(b'"%d":1' % i for i in range(900_000)) + b"}"],
    ids=["lists", "names"],
)
def test_a_flood_of_members_is_refused_before_it_is_decoded(server, flood):
    """Decoding holds everybody up, and millions of small parts take seconds."""
    started = time.process_time()
    response = server.http.post(
        "/v1/completions", content=b'{"model": "tiny", "prompt": "x", "more": ' + flood + b"}", headers=JSON
    )
    assert "texts, lists and objects" in error_of(response, 413)["message"]
    assert time.process_time() - started < 2


@pytest.mark.parametrize("text", [b"[{" * 3_000_000, b'\\"' * 3_000_000, b'[\\"' * 2_000_000])
def test_signs_within_a_text_are_no_members(text):
    assert len(decode(b'{"prompt": "' + text + b'"}')["prompt"]) >= 3_000_000
    with pytest.raises(ApiError, match="no valid JSON"):
        decode(b'{"prompt": "' + text)


def test_compressed_bodies(server):
    body = gzip.compress(json.dumps(BASE).encode())
    response = server.http.post("/v1/completions", content=body, headers=JSON | {"Content-Encoding": "gzip"})
    assert "not compressed" in error_of(response, 415)["message"]


@pytest.mark.parametrize("form", [{"grammar": 'root ::= "a" root'}, {"regex": "(" * 11 + "a" + "{9})" * 11}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_costs_too_much_is_the_requests_fault(server, form, stream, caplog):
    """Its cost is known only where its text leads, so a stream may have begun."""
    response = server.post("/v1/completions", BASE | {"structured_outputs": form, "max_tokens": 9, "stream": stream})
    error = events_of(response.text)[-1]["error"] if stream else error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
    assert error["message"].startswith("structured_outputs: ")
    assert not caplog.records


FORMATS = {  # as `response_format` -> what is said of it
    "schema": ({"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, "response_format: json_schema: "),
    "ends": ({"type": "json_object"}, "response_format: an answer ends where its form is complete"),
}


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize(("form", "said"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_is_called_what_the_client_calls_it(server, route, form, said, stream):
    """Not structured_outputs, which is what the engine makes of it."""
    body = BASE | {"response_format": form, "stream": stream, "ignore_eos": said.endswith("complete")}
    error = error_of(server.post(route, body), param="response_format")
    assert error["message"].startswith(said)
    assert "structured_outputs" not in error["message"]


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_that_costs_too_much(server, route, stream):
    """The error comes from inside of a step, and may come within a stream."""
    schema = {"type": "string", "pattern": "^" + "(" * 11 + "a" + "{9})" * 11 + "$"}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    response = server.post(route, BASE | {"response_format": form, "max_tokens": 9, "stream": stream})
    error = events_of(response.text)[-1]["error"] if stream else error_of(response)
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 900}, "n"),
        ({"best_of": 900}, "best_of"),
        ({"n": 2, "best_of": 900}, "best_of"),
        ({"n": 30, "use_beam_search": True}, "n"),
        ({"n": 2, "best_of": 30, "use_beam_search": True}, "best_of"),
        ({"n": 16, "max_tokens": 900, "ignore_eos": True}, "n"),
        ({"best_of": 16, "max_tokens": 900, "ignore_eos": True}, "best_of"),
        # two fields that contradict each other: the first of them
        ({"n": 4, "best_of": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": None, "max_completion_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "use_beam_search": True, "n": 2}, "use_beam_search"),
    ],
)
@pytest.mark.parametrize("route", ROUTES[:2])
def test_the_field_at_fault_is_one_that_was_sent(server, route, fields, param):
    message = error_of(server.post(route, BASE | fields), param=param)["message"]
    assert message.startswith(f"{param}: ")
    assert ("max_completion_tokens" in message) == ("max_completion_tokens" in fields)
    assert "structured_outputs" not in message or "structured_outputs" in fields


def test_arguments_of_a_template_say_nothing_of_ours(server):
    for name in ("self", "messages", "tokenize"):
        error = error_of(server.post("/v1/chat/completions", {**BASE, "chat_template_kwargs": {name: 1}}))
        assert error["message"] == f"chat_template_kwargs: {name} cannot be set here"


CONTRADICTIONS = {  # fields -> the one that is named
    "form and length": ({"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 5}, "structured_outputs"),
    "format and length": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}, "min_tokens": 8},
        "response_format",
    ),
    "tokens and words": ({"allowed_token_ids": [98], "bad_words": ["b"]}, "allowed_token_ids"),
    "tokens and ends": ({"allowed_token_ids": [98], "stop_token_ids": [98], "min_tokens": 3}, "allowed_token_ids"),
    "form and tokens": ({"structured_outputs": {"regex": "abc"}, "allowed_token_ids": [98]}, "structured_outputs"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_rules_that_leave_no_token_are_the_requests_fault(server, fields, param, stream, caplog):
    response = server.post("/v1/completions", BASE | {"max_tokens": 8, "stream": stream} | fields)
    error = events_of(response.text)[-1]["error"] if stream else error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param} and ")
    assert error["message"].endswith("ruled out every token: none is left to draw")
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_looks_mistyped_is_told_to_the_client(server, stream):
    response = server.post("/v1/completions", BASE | {"max_tokns": 3, "user": "me", "stream": stream})
    assert response.headers["X-Ignored-Fields"] == "'max_tokns': did you mean 'max_tokens'?"
    assert "X-Ignored-Fields" not in server.post("/v1/completions", BASE | {"user": "me"}).headers


def test_a_field_that_is_missing_may_have_been_mistyped(server):
    body = {"model": MODEL, "mesages": BASE["messages"]}
    error = error_of(server.post("/v1/chat/completions", body), param="messages")
    assert error["message"].endswith("(there is 'mesages')")
