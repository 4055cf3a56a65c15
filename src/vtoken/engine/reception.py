"""`Reception`: which requests an `AsyncLLM` has taken on, under which ids, and how many may wait."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from vtoken.base.errors import ConfigError, QueueFullError, RequestError
from vtoken.engine.mailbox import Mailbox
from vtoken.schedule.sequence import Status


@dataclass
class _Guest:
    request_id: str
    num_choices: int
    num_tokens: int = 0  # of the prompt, once it is tokenized
    waits: bool = True  # until it runs for the first time


class Reception:
    """Keeps ids unique and the queue short. Any thread may call anything.

    A request waits from when it is taken on until it first runs, so also while it is tokenized. Whatever the limits,
    one is let in where none waits.
    """

    def __init__(self, max_queued_requests: int | None = None, max_queued_tokens: int | None = None) -> None:
        for name, limit in (("max_queued_requests", max_queued_requests), ("max_queued_tokens", max_queued_tokens)):
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise ConfigError(f"{name}: expected a whole number from 1 up, or None (no limit), got {limit!r}")
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._is_limited = max_queued_requests is not None or max_queued_tokens is not None
        self._lock = Lock()
        self._guests: dict[Mailbox, _Guest] = {}
        self._by_id: dict[str, Mailbox] = {}
        self._num_choices = 0  # of those that wait
        self._num_tokens = 0
        self.num_refused = 0
        """Requests that found the queue full."""

    def check_together(self, num_prompts: int, num_choices: int, choices_field: str = "n") -> None:
        """Raise RequestError if prompts of `num_choices` each, all of which are to be let in, can never be: not even
        where nobody else waits."""
        most = self._max_requests
        if most is not None and num_prompts > 1 and num_prompts * num_choices > most:
            field = "prompt" if num_prompts > most else choices_field
            raise RequestError(
                f"{field}: {num_prompts} prompts times {choices_field}={num_choices} are {num_prompts * num_choices} "
                f"choices, but at most {most} may wait (max_queued_requests); ask for fewer at a time",
                field,
            )

    def enter(self, mailbox: Mailbox, request_id: str, num_choices: int) -> None:
        """Take a request on. Raises RequestError for an id in use, QueueFullError where too many choices wait."""
        with self._lock:
            if request_id in self._by_id:
                raise RequestError(
                    f"request_id: {request_id!r} is in use by a request that has not finished", "request_id"
                )
            most = self._max_requests
            if most is not None and self._num_choices and self._num_choices + num_choices > most:
                self.num_refused += 1
                raise QueueFullError(
                    f"the queue is full: {self._num_choices} choices wait and {num_choices} would come, but "
                    f"{most} may wait (max_queued_requests); try again later"
                )
            self._guests[mailbox] = _Guest(request_id, num_choices)
            self._by_id[request_id] = mailbox
            self._num_choices += num_choices

    def weigh(self, mailbox: Mailbox, num_tokens: int) -> None:
        """The prompt of one that was taken on has `num_tokens`. Raises QueueFullError where too many wait."""
        with self._lock:
            most = self._max_tokens
            if most is not None and self._num_tokens and self._num_tokens + num_tokens > most:
                self.num_refused += 1
                raise QueueFullError(
                    f"the queue is full: prompts of {self._num_tokens} tokens wait and {num_tokens} would come, but "
                    f"{most} may wait (max_queued_tokens); try again later"
                )
            guest = self._guests.get(mailbox)
            if guest is not None:  # not aborted meanwhile
                guest.num_tokens = num_tokens
                self._num_tokens += num_tokens

    def let_go(self) -> None:
        """After a step: who has run does not wait any more."""
        if self._is_limited:
            with self._lock:
                for mailbox, guest in self._guests.items():
                    if guest.waits and mailbox.request is not None and mailbox.request.status is not Status.WAITING:
                        self._stop_waiting(guest)

    def leave(self, mailbox: Mailbox) -> None:
        """It has ended, and its id is free. No error if that was known."""
        with self._lock:
            guest = self._guests.pop(mailbox, None)
            if guest is not None:
                del self._by_id[guest.request_id]
                self._stop_waiting(guest)

    def _stop_waiting(self, guest: _Guest) -> None:
        if guest.waits:
            guest.waits = False
            self._num_choices -= guest.num_choices
            self._num_tokens -= guest.num_tokens

    def find(self, request_id: str) -> Mailbox | None:
        with self._lock:
            return self._by_id.get(request_id)

    def everybody(self) -> list[Mailbox]:
        with self._lock:
            return list(self._guests)

    @property
    def num_queued(self) -> int:
        """Choices that have never run, as far as limits ask for it."""
        return self._num_choices
