"""The limit of open files, and what is logged where it is reached."""

from __future__ import annotations

import asyncio
import errno
import os
import resource

import pytest

from vtoken.server.open_files import AcceptErrors, raise_limit

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 2**20), (65536, 2**20)),
        ((1024, UNLIMITED), (65536, UNLIMITED)),
        ((100_000, 2**20), None),
        ((4096, 4096), None),
        ((UNLIMITED, UNLIMITED), None),
    ],
)
def test_the_soft_limit_is_raised(monkeypatch, before, after):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: before)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: found.append(limits))
    raise_limit()
    assert found == ([] if after is None else [after])


@pytest.mark.parametrize("error", [ValueError("not allowed"), PermissionError(errno.EPERM, "no")])
def test_a_limit_that_cannot_be_raised_is_no_error(monkeypatch, error):
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise error

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_limit()


def test_a_line_in_ten_seconds(monkeypatch, caplog):
    loop, now = asyncio.new_event_loop(), [0.0]
    monkeypatch.setattr(loop, "time", lambda: now[0])
    loop.set_exception_handler(AcceptErrors())
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        for moment, lines in ((0.0, 1), (0.0, 1), (9.0, 1), (10.5, 2), (11.0, 2)):
            now[0] = moment
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": full})
            assert len(caplog.records) == lines
        assert all("Too many open files" in each.message and not each.exc_info for each in caplog.records)
        loop.call_exception_handler({"message": "a callback failed", "exception": full})  # as ever
        assert caplog.records[-1].name == "asyncio"
        assert caplog.records[-1].exc_info
    finally:
        loop.close()
