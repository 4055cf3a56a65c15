"""`EngineThread`: the one thread that owns an engine, and what other threads may ask of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

from vtoken.base.clock import Clock, MonotonicClock
from vtoken.base.errors import EngineError, VtokenError, describe
from vtoken.engine.engine import CheckedRequest, Engine
from vtoken.engine.mailbox import Mailbox
from vtoken.engine.outputs import CompletionOutput, RequestOutput
from vtoken.engine.reception import Reception
from vtoken.schedule.sequence import FinishReason, Request, Status

logger = logging.getLogger("vtoken")

T = TypeVar("T")
StepListener = Callable[[Engine, list[RequestOutput]], None]


class EngineThread:
    """Steps an engine while it has work, sleeps while it has none.

    Other threads put calls into its inbox; they run between two steps, in the order in which they came. Nothing ever
    waits for a reader: outputs go to mailboxes.
    """

    def __init__(self, engine: Engine, reception: Reception, clock: Clock | None = None) -> None:
        self.engine = engine
        self.reception = reception
        self.listeners: tuple[StepListener, ...] = ()
        self._clock = clock or MonotonicClock()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Held to put in what somebody waits for, and to set what keeps such things out: nothing is put in too late.
        self._gate = Lock()
        self._is_closing = False  # no request comes in
        self._has_ended = False  # no call comes in
        self._error: BaseException | None = None
        self._pending: set[Future[Any]] = set()  # calls whose caller waits
        self._mailboxes: dict[Request, Mailbox] = {}
        self._is_stopping = False  # ends as soon as no request is left
        self._progress: float | None = None  # when the last step ended, or work came; None while there is none
        self._complained = False
        self._thread = Thread(target=self._run, name="vtoken-engine", daemon=True)
        self._thread.start()

    # --- for other threads ------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise EngineError if nothing can be asked any more."""
        if self._error is not None:
            raise self._death()
        if self._is_closing:
            raise EngineError("this AsyncLLM is closed; make a new one")

    def submit(self, checked: CheckedRequest, mailbox: Mailbox) -> None:
        """Queue a request. Raises EngineError if the engine has died or is about to close."""
        with self._gate:
            self.check_open()
            self._inbox.put(partial(self._add, checked, mailbox))

    def abandon(self, mailbox: Mailbox) -> None:
        """Nobody will read any more: end the request. Takes no lock, for it may be called by the garbage collector."""
        mailbox.is_abort_asked = True
        self._inbox.put(partial(self._abort, mailbox))

    def abort(self, mailboxes: Iterable[Mailbox]) -> Future[None]:
        """End requests; their readers get the last outputs."""
        mailboxes = list(mailboxes)
        for mailbox in mailboxes:
            mailbox.is_abort_asked = True
        return self.call(partial(self._abort_all, mailboxes))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` between two steps. Raises EngineError if the engine has died; when it is closed, runs it here."""
        future: Future[T] = Future()
        with self._gate:
            if self._error is not None:
                raise self._death()
            if not self._has_ended:
                self._pending.add(future)
                self._inbox.put(partial(self._answer, future, work))
                return future
        self._answer(future, work)
        return future

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._error is None and not self._is_closing

    @property
    def last_step_age(self) -> float:
        """Seconds since the last step ended while there is work; 0 while there is none."""
        progress = self._progress
        return 0.0 if progress is None else max(0.0, self._clock.now() - progress)

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """Take nothing new; end what runs, or with `drain` let it end within `timeout` seconds; join the thread."""
        with self._gate:
            self._is_closing = True
        if not drain:
            self._inbox.put(self._abort_everything)
        self._inbox.put(self._stop)
        if current_thread() is self._thread:  # the last reference went away in a listener
            return
        self._thread.join(timeout if drain else None)
        if self._thread.is_alive():
            self._inbox.put(self._abort_everything)
            self._thread.join()

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping or self.engine.has_unfinished_requests():
                self._do_what_was_asked()
                if self.engine.has_unfinished_requests():
                    self._deliver(self.engine.advance())
                    self._progress = self._clock.now()
        except BaseException as error:
            self._die(error)
        finally:
            self._progress = None
            try:
                self.engine.close()
            except Exception:
                logger.exception("the engine could not be closed")
            with self._gate:
                self._has_ended = True
            if self._error is None:
                self._do_the_rest()

    def _do_what_was_asked(self) -> None:
        if not self.engine.has_unfinished_requests():
            self._progress = None
            call = self._inbox.get()
            self._progress = self._clock.now()
            call()
        self._do_the_rest()

    def _do_the_rest(self) -> None:
        while True:
            try:
                call = self._inbox.get_nowait()
            except Empty:
                return
            call()

    def _add(self, checked: CheckedRequest, mailbox: Mailbox) -> None:
        if mailbox.is_abort_asked:  # while it was tokenized, or on its way here
            self.reception.leave(mailbox)
            self.engine.scheduler.counters.finished[FinishReason.ABORT] += 1
            mailbox.put(_aborted(checked))
            self._wake([mailbox])
            return
        try:
            mailbox.request = self.engine.add(checked)
        except VtokenError as error:
            self.reception.leave(mailbox)
            mailbox.fail(error)
            self._wake([mailbox])
        else:
            self._mailboxes[mailbox.request] = mailbox

    def _abort(self, mailbox: Mailbox) -> None:
        request = mailbox.request
        if request is not None and request.status is not Status.FINISHED:
            self.engine.abort_request(request.request_id)
        self.reception.leave(mailbox)

    def _abort_all(self, mailboxes: list[Mailbox]) -> None:
        for mailbox in mailboxes:
            self._abort(mailbox)

    def _abort_everything(self) -> None:
        self._abort_all(list(self._mailboxes.values()))

    def _stop(self) -> None:
        self._is_stopping = True

    def _answer(self, future: Future[T], work: Callable[[], T]) -> None:
        self._pending.discard(future)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _deliver(self, outputs: list[tuple[Request, RequestOutput]]) -> None:
        to_wake = []
        for request, output in outputs:
            mailbox = self._mailboxes.get(request)
            if mailbox is None:  # somebody else's, who drives the engine too
                continue
            if output.finished:
                del self._mailboxes[request]
                self.reception.leave(mailbox)
            if mailbox.put(output):
                to_wake.append(mailbox)
        self._wake(to_wake)
        self.reception.let_go()
        for listener in self.listeners:
            try:
                listener(self.engine, [output for _, output in outputs])
            except Exception:
                if not self._complained:
                    logger.exception("a step listener failed; further failures are not reported")
                self._complained = True

    def _wake(self, mailboxes: Iterable[Mailbox]) -> None:
        """Wake readers, each loop once: a callback for every reader would cost a system call each."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mailboxes:
            by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, waiting in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, waiting)
            except RuntimeError:  # the loop is closed, so nobody will ever read
                self._abort_all(waiting)

    def _die(self, error: BaseException) -> None:
        """A fault of the engine as a whole: everybody who waits is told."""
        logger.critical("the engine has died: %s", describe(error), exc_info=error)
        with self._gate:
            self._error = error
        waiting = self.reception.everybody()
        for mailbox in waiting:
            mailbox.fail(self._death())
            self.reception.leave(mailbox)
        self._mailboxes.clear()
        self._wake(waiting)
        for future in self._pending:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._death())
        self._pending.clear()

    def _death(self) -> EngineError:
        """A new error for each who gets it: what is raised collects the traceback of its reader."""
        assert self._error is not None
        death = EngineError(f"the engine has died, start a new one: {describe(self._error)}")
        death.__cause__ = self._error
        return death


def _wake_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


def _aborted(checked: CheckedRequest) -> RequestOutput:
    """The end of a request that the engine never saw."""
    choices = [CompletionOutput(i, "", [], FinishReason.ABORT.value) for i in range(checked.params.n)]
    return RequestOutput(checked.request_id, checked.text, checked.token_ids, choices, finished=True)
