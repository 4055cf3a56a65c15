"""The routes of the dashboard: what they answer, to whom, and what the page may do."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.serving import Served, checked, error_of, serve, until
from vtoken.memory.block_map import BLOCK
from vtoken.server.dashboard import router
from vtoken.server.dashboard.page import page
from vtoken.server.run import _is_worth_a_line

LONG = {"prompt": "Tell me", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[Served]:
    """A server whose steps take their time, so that requests are there to be seen."""
    with serve(folder) as served:
        served.llm.add_step_listener(lambda engine, outputs: time.sleep(0.01))
        yield served


@pytest.fixture(autouse=True)
def _short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "STREAM_SECONDS", 1.0)


def frames_of(server: Served, since: int = 0) -> list[dict[str, Any]]:
    text = checked_text(server, f"/dashboard/stream?since={since}")
    found = []
    for message in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in message.splitlines())
        if "id" in fields:
            found.append(json.loads(fields["data"]))
            assert found[-1]["n"] == int(fields["id"])
    return found


def checked_text(server: Served, path: str) -> str:
    response = server.http.get(path)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    return response.text


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_slash_behind_it_leads_to_the_page(folder, prefix):
    """Without a key, and to the place that the client knows, whether or not a proxy cuts the root path off."""
    with serve(folder, api_key="sesame", root_path="/llm") as served:
        told = served.http.get(f"{prefix}/dashboard/")
        assert (told.status_code, told.headers["location"]) == (307, "../dashboard")
        found = served.http.get(f"{prefix}/dashboard/", follow_redirects=True)
        assert (found.status_code, found.url.path) == (200, f"{prefix}/dashboard")
        assert found.text == page()[0]
        error_of(served.http.get(f"{prefix}/dashboard//"), 401)


def test_the_page_holds_itself_and_nothing_else(server: Served) -> None:
    response = server.http.get("/dashboard")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    html, policy = response.text, response.headers["content-security-policy"]
    assert (html, policy) == page()
    assert "http:" not in html
    assert "https:" not in html
    assert not re.search(r"\ssrc=|url\(|@import|innerHTML|insertAdjacentHTML|document\.write|\beval\(|style=\"", html)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy


def test_state_is_this_moment(server: Served) -> None:
    state = checked(server.http.get("/dashboard/state"))
    facts, frame = state["facts"], state["frame"]
    assert (facts["title"], facts["num_blocks"], facts["block_size"]) == ("tiny", 256, 16)
    assert frame["key"]
    assert frame["requests"] == [0, 0, 0]
    cells = np.frombuffer(b64decode(frame["blocks"]["all"]), BLOCK)
    assert len(cells) == 256
    assert not cells["refs"].any()
    usage = server.ask(lambda engine: engine.stats().usage)
    assert frame["usage"]["free_blocks"] == usage.free_blocks


def test_the_stream_tells_what_happens_and_goes_on_where_one_left(slow: Served) -> None:
    before = frames_of(slow)
    assert before[0]["key"]
    assert [frame["n"] for frame in before] == list(range(before[0]["n"], before[0]["n"] + len(before)))
    with slow.http.stream("POST", "/v1/completions", json={"model": "tiny", "stream": True, **LONG}) as response:
        lines = response.iter_lines()  # held, or the request would be ended
        next(lines)
        after = frames_of(slow, before[-1]["n"] + 1)
    assert after[0]["n"] == before[-1]["n"] + 1
    assert {frame["run"] for frame in after} == {before[0]["run"]}
    assert any(frame["rows"] and frame["requests"][0] == 1 for frame in after)
    assert any(facts[2] == len("Tell me") for frame in after for facts in frame["facts"])


def test_tokens_of_a_request_that_runs_and_of_one_that_ended(slow: Served) -> None:
    with slow.http.stream("POST", "/v1/completions", json={"model": "tiny", "stream": True, **LONG}) as response:
        lines = response.iter_lines()  # held, or the request would be ended
        next(lines)
        [row] = [row for row in checked(slow.http.get("/dashboard/state"))["frame"]["rows"] if row[1] == 1]
        number = row[0]
        told = checked(slow.http.get(f"/dashboard/requests/{number}"))
        assert told["number"] == number
        assert "".join(told["text"]).startswith("Tell me")
        assert told["state"] == "running"
        assert (told["prompt"], told["start"], told["policy"]) == (len("Tell me"), 0, None)
        part = checked(slow.http.get(f"/dashboard/requests/{number}?start=3"))
        assert (part["start"], part["text"][:4]) == (3, list("l me"))
        frames_of(slow)  # in one of these it is seen, and so it can be found when it has ended
    until(slow.is_idle)
    frames_of(slow)
    ended = checked(slow.http.get(f"/dashboard/requests/{number}"))
    assert ended["state"] == "finished"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/dashboard/requests/x", 400),
        ("/dashboard/requests/0?choice=-1", 400),
        ("/dashboard/requests/0?start=-4", 400),
        ("/dashboard/stream?since=-1", 400),
        ("/dashboard/stream?since=abc", 400),
        ("/dashboard/nothing", 404),
    ],
)
def test_what_is_not_there_or_wrong_is_said(server: Served, path: str, status: int) -> None:
    error_of(server.http.get(path), status)


@pytest.mark.parametrize("request_", ["123456", "-1", "0?choice=99999999999999999999999"])
def test_a_request_that_has_gone_is_no_error(server: Served, request_: str) -> None:
    assert server.http.get(f"/dashboard/requests/{request_}").status_code == 204


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Served]:
    with serve(folder, api_key="sesame") as served:
        yield served


@pytest.mark.parametrize("path", ["state", "stream", "requests/0"])
def test_the_page_is_open_and_its_data_is_not(guarded: Served, path: str) -> None:
    assert guarded.http.get("/dashboard").status_code == 200
    assert "sesame" not in guarded.http.get("/dashboard").text
    error_of(guarded.http.get(f"/dashboard/{path}"), 401)
    error_of(guarded.http.get(f"/dashboard/{path}", headers={"Authorization": "Bearer open"}), 401)
    allowed = guarded.http.get(f"/dashboard/{path}", headers={"Authorization": "Bearer sesame"})
    assert allowed.status_code == (204 if path == "requests/0" else 200)


def test_it_can_be_turned_off(folder: Path) -> None:
    with serve(folder, dashboard=False) as served:
        for path in ("/dashboard", "/dashboard/state"):
            error_of(served.http.get(path), 404)


def test_who_watches_is_told_when_the_engine_ends(folder: Path) -> None:
    with serve(folder) as served:
        served.llm.close()
        text = checked_text(served, "/dashboard/stream")
        assert text.endswith('event: end\ndata: "the engine has ended"\n\n')


@pytest.mark.parametrize(
    ("path", "status", "is_told"),
    [
        ("/dashboard", 200, True),
        ("/dashboard/stream?since=7", 200, False),
        ("/llm/dashboard/requests/3", 200, False),
        ("/dashboard/requests/3", 401, True),
        ("/v1/models", 200, True),
    ],
)
def test_the_log_is_not_filled_by_who_watches(path: str, status: int, is_told: bool) -> None:
    record = logging.makeLogRecord(
        {
            "name": "uvicorn.access",
            "msg": '%s - "%s %s HTTP/%s" %d',
            "args": ("127.0.0.1:1", "GET", path, "1.1", status),
        }
    )
    assert _is_worth_a_line(record) == is_told
