"""Rows of the list of known faults that concern sampling, through the API."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.serving import MODEL, error_of
from vtoken.server.logprobs import finite

LONG = {"max_tokens": 24, "ignore_eos": True}


def texts(found) -> list[str]:
    return [choice["text"] for choice in found["choices"]]


def test_u37_u38_choices_and_seeds(server):
    """n different answers, each reproducible, whatever runs beside; every choice ends by itself; usage sums all."""
    alone = server.complete(prompt="Hi", n=4, seed=11, **LONG)
    assert len(set(texts(alone))) == 4
    assert alone["usage"]["completion_tokens"] == 96
    assert all(choice["finish_reason"] == "length" for choice in alone["choices"])
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(server.complete, prompt=f"other {i}", n=2, **LONG) for i in range(7)]
        again = pool.submit(server.complete, prompt="Hi", n=4, seed=11, **LONG)
        assert texts(again.result()) == texts(alone)
        [other.result() for other in others]
    assert texts(server.complete(prompt="Hi", n=1, seed=11, **LONG)) == texts(alone)[:1]
    assert texts(server.complete(prompt="Hi", **LONG)) != texts(server.complete(prompt="Hi", **LONG))


def test_u49_greedy_in_a_crowd(server):
    alone = texts(server.complete(prompt="Once upon", temperature=0, **LONG))
    with ThreadPoolExecutor(16) as pool:
        crowd = [pool.submit(server.complete, prompt="Once upon", temperature=0, **LONG) for _ in range(16)]
        assert all(texts(each.result()) == alone for each in crowd)


@pytest.mark.parametrize("params", [{"temperature": 1e-9}, {"top_k": 1, "temperature": 5}, {"top_p": 1e-9}])
def test_u64_what_amounts_to_greedy(server, params):
    greedy = texts(server.complete(prompt="Hi", temperature=0, **LONG))
    assert texts(server.complete(prompt="Hi", **params, **LONG)) == greedy


@pytest.mark.parametrize("params", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}, {"repetition_penalty": 1}])
def test_u64_what_is_off(server, params):
    plain = texts(server.complete(prompt="Hi", seed=3, **LONG))
    assert texts(server.complete(prompt="Hi", seed=3, **params, **LONG)) == plain


def test_u65_penalties(server):
    """Presence counts the answer only; logprobs are the model's own, whatever the rules."""
    body = {"prompt": "aaaaaaaa", "max_tokens": 1, "logprobs": 5, "temperature": 0}
    plain = server.complete(**body)["choices"][0]["logprobs"]
    assert server.complete(**body, presence_penalty=2)["choices"][0]["logprobs"] == plain
    repeated = server.complete(prompt="x", max_tokens=8, logit_bias={"65": 30}, temperature=0)
    assert texts(repeated) == ["AAAAAAAA"]
    varied = server.complete(prompt="x", max_tokens=20, logit_bias={"65": 3}, temperature=0, frequency_penalty=2)
    assert 0 < texts(varied)[0].count("A") < 20


def test_u66_stops(server):
    for none in (None, []):
        assert server.complete(prompt="x", max_tokens=3, stop=none)["usage"]["completion_tokens"] <= 3
    error_of(server.post("/v1/completions", {"model": MODEL, "prompt": "x", "stop": ""}), param="stop")


def test_u68_a_width_that_never_fits_is_refused_at_once(server):
    error_of(server.post("/v1/completions", {"model": MODEL, "prompt": "x", "n": 1000}), param="n")


def test_u42_what_json_does_not_have():
    assert [finite(value) for value in (-math.inf, math.nan, math.inf, -1.5, -1e9)] == [
        -9999.0,
        -9999.0,
        0.0,
        -1.5,
        -9999.0,
    ]


def test_u42_a_score_of_minus_infinity(server, monkeypatch):
    """Also in a stream, the JSON is valid."""
    from vtoken.engine import tracked

    names = tracked.name_scores

    def broken(token_ids, scores, text_of):
        scores.logprobs[:] = -math.inf
        scores.top_logprobs[:] = math.nan
        return names(token_ids, scores, text_of)

    monkeypatch.setattr(tracked, "name_scores", broken)
    found = server.complete(prompt="x", max_tokens=3, logprobs=2, ignore_eos=True)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-9999.0] * 3
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    events = server.stream("/v1/chat/completions", {**body, "ignore_eos": True})[:-1]
    assert all(each["logprob"] == -9999.0 for event in events for each in event["choices"][0]["logprobs"]["content"])
