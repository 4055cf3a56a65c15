"""`AsyncLLM`: a model that answers many at once, from asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar
from uuid import uuid4

from vtoken.base.clock import Clock, MonotonicClock
from vtoken.base.config import EngineConfig
from vtoken.base.errors import EngineError
from vtoken.base.sampling_params import SamplingParams
from vtoken.engine.build import build_engine
from vtoken.engine.chat import Message
from vtoken.engine.engine import CheckedRequest, Engine
from vtoken.engine.engine_thread import EngineThread, StepListener
from vtoken.engine.mailbox import Mailbox
from vtoken.engine.openmp import give_back_threads
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.prompts import AnyPrompt, parse_prompt
from vtoken.engine.reception import Reception
from vtoken.engine.stats import EngineStats
from vtoken.engine.text import Tokenizer
from vtoken.engine.tracked import OutputKind

T = TypeVar("T")

_TOKENIZER_THREADS = 4  # so that a huge prompt does not keep short ones waiting


class AsyncLLM:
    """Loads a model and answers requests as they come, any number at once.

    >>> async with AsyncLLM("smollm2-135m", num_blocks=256, max_model_len="auto") as llm:
    ...     async for output in llm.generate("The capital of France is", output_kind="delta"):
    ...         print(output.outputs[0].text, end="", flush=True)

    One thread of its own runs the engine; prompts are tokenized in others. It may be used from several event loops and
    threads; a stream belongs to the loop that reads it. A reader who is slow, or gone, keeps nobody waiting.

    Args:
        model, settings: as for `LLM`.
        max_queued_requests: choices that may wait for their first step, those of all requests together; one more is
            refused at once with QueueFullError. None: any number.
        max_queued_tokens: the same in tokens of their prompts.

    Raises ConfigError or CheckpointError, in one line, for what cannot work.
    """

    def __init__(
        self,
        model: str,
        *,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        **settings: Any,
    ) -> None:
        reception = Reception(max_queued_requests, max_queued_tokens)
        clock = MonotonicClock()
        self._start(build_engine(EngineConfig(model=model, **settings), clock), reception, clock)

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        *,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Around an engine that nobody else uses from now on."""
        self = cls.__new__(cls)
        self._start(engine, Reception(max_queued_requests, max_queued_tokens), clock or MonotonicClock())
        return self

    def _start(self, engine: Engine, reception: Reception, clock: Clock) -> None:
        self.engine = engine
        """Its thread's alone; what a step does not change (facts, config, tokenizer) may be read by anybody."""
        self._reception = reception
        give_back_threads()  # of loading; the engine's thread gets its own
        self._thread = EngineThread(engine, reception, clock)
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="vtoken-tokenizer")
        # Also when it is forgotten, and when the program ends, the thread ends before what it runs on is torn down.
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, self._pool)

    # --- requests ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Answer a prompt: `async for output in llm.generate(...)`.

        The request starts with the first read, or with `await stream.start()`. To leave the loop early, by `break`, an
        exception, a cancelled task or a timeout, ends it and gives its blocks back.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; a mapping may have a
                `"cache_salt"`.
            request_id: unique among those that have not finished; None: one is made.
            output_kind: "cumulative": the answer so far, "delta": what is new, "final": the whole in the end, once.
                A reader who is late by more than a few steps gets one output for all of them.
            cache_salt: texts with different ones never share cached blocks.

        Raises RequestError, here or when it starts, and then nothing was queued; QueueFullError when it starts;
        EngineError if the engine is closed or dies.
        """
        text_or_ids, salt = parse_prompt(prompt)
        salt = salt if cache_salt is None else cache_salt
        return self._stream(lambda: text_or_ids, sampling_params, request_id, output_kind, salt)

    def chat(
        self,
        messages: SequenceOf[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        output_kind: OutputKind = "cumulative",
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Answer a conversation in the model's chat format: `async for output in llm.chat(messages)`.

        `messages`, `tools` and what follows are those of `Tokenizer.encode_chat`; the rest is as for `generate`. An
        answer has at most 16 tokens unless `sampling_params` says otherwise: `max_tokens=None` is all the room left.
        """
        encode = partial(
            self.get_tokenizer().encode_chat,
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._stream(encode, sampling_params, request_id, output_kind, cache_salt)

    def _stream(
        self,
        prompt: Callable[[], Any],
        params: SamplingParams | None,
        request_id: str | None,
        output_kind: OutputKind,
        cache_salt: str | None,
    ) -> RequestStream:
        """`prompt` makes text or token ids, in a thread of the pool."""
        self._thread.check_open()
        request_id = uuid4().hex if request_id is None else request_id
        params = self.engine.check_parameters(request_id, params, output_kind=output_kind, cache_salt=cache_salt)

        def check() -> CheckedRequest:
            return self.engine.check_request(
                request_id, prompt(), params, output_kind=output_kind, cache_salt=cache_salt
            )

        return RequestStream(self, request_id, params.num_choices, output_kind, check)

    def check_together(self, num_prompts: int, sampling_params: SamplingParams) -> None:
        """For those who start so many requests, all or none: raise RequestError if they cannot wait together, ever."""
        self._reception.check_together(num_prompts, sampling_params.num_choices, sampling_params.choices_field)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests, in whatever state: when this returns, their blocks are back and their ids free.

        Their readers get a last output with finish_reason "abort". Unknown and ended ids are no error.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        found = [mailbox for mailbox in map(self._reception.find, ids) if mailbox is not None]
        await asyncio.wrap_future(self._thread.abort(found))

    # --- looking in -------------------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """What the memory holds, and what happened so far; after the step that runs now."""
        return await self.run_in_engine(lambda engine: engine.stats())

    async def run_in_engine(self, work: Callable[[Engine], T]) -> T:
        """`work(engine)` between two steps, in the engine's thread: while it runs, nothing else does."""
        return await asyncio.wrap_future(self.call_in_engine(work))

    def call_in_engine(self, work: Callable[[Engine], T]) -> Future[T]:
        """`run_in_engine` for threads without an event loop, and for those who will not wait until a step is over."""
        return self._thread.call(partial(work, self.engine))

    def add_step_listener(self, listener: StepListener) -> None:
        """From now on call `listener(engine, outputs)` after each step, in the engine's thread: it had better be short.

        `outputs` are those of the step, of each request as it asked for them; `engine.stats()` has the counters.
        """
        self._thread.listeners += (listener,)

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: the engine was not closed and has not died."""
        return self._thread.is_alive

    @property
    def last_step_age(self) -> float:
        """Seconds since the last step ended, while there is work; 0 while there is none. If it grows, a step hangs."""
        return self._thread.last_step_age

    @property
    def num_queued(self) -> int:
        """Choices that have never run; counted exactly only where there is a limit on the queue."""
        return self._reception.num_queued

    @property
    def num_refused(self) -> int:
        """Requests that were refused so far because the queue was full."""
        return self._reception.num_refused

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineError with skip_tokenizer_init=True."""
        if self.engine.tokenizer is None:
            raise EngineError("this engine has no tokenizer (skip_tokenizer_init=True)")
        return self.engine.tokenizer

    async def with_tokenizer(self, work: Callable[[Tokenizer], T]) -> T:
        """`work(tokenizer)` in one of the threads that tokenize prompts, so that a long text stalls no event loop."""
        tokenizer = self.get_tokenizer()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, tokenizer)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Take no more requests, and give memory and threads back. May be called twice, and from any thread.

        What still runs is aborted, at once or, with `drain`, after `timeout` seconds (None: never). Blocks until all is
        over; what was answered meanwhile can be read afterwards.
        """
        _shut_down(self._thread, self._pool, drain=drain, timeout=timeout)
        self._finalizer.detach()

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close, drain=drain, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def _shut_down(
    thread: EngineThread, pool: ThreadPoolExecutor, *, drain: bool = False, timeout: float | None = None
) -> None:
    thread.close(drain, timeout)
    pool.shutdown(wait=False)


class RequestStream:
    """The outputs of one request, as an asynchronous iterator for one reader.

    When it is left, closed or forgotten, the request ends. `async with` makes sure that this happens at the end of a
    block, also where a variable or a traceback still holds the stream.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        request_id: str,
        num_choices: int,
        output_kind: OutputKind,
        check: Callable[[], CheckedRequest],
    ) -> None:
        self.request_id = request_id
        self._llm = llm
        self._num_choices = num_choices
        self._output_kind = output_kind
        self._check = check
        self._mailbox: Mailbox | None = None
        self._is_submitted = False
        self._is_over = False

    async def start(self) -> None:
        """Tokenize and queue the request, unless that was done. Raises RequestError, QueueFullError or EngineError."""
        if self._mailbox is not None:
            return
        llm, loop = self._llm, asyncio.get_running_loop()
        llm._thread.check_open()
        mailbox = self._mailbox = Mailbox(loop, self._output_kind)
        try:
            llm._reception.enter(mailbox, self.request_id, self._num_choices)
            try:
                checked = await loop.run_in_executor(llm._pool, self._check)
                llm._reception.weigh(mailbox, len(checked.token_ids))
                llm._thread.submit(checked, mailbox)
            except BaseException:
                llm._reception.leave(mailbox)
                raise
        except BaseException:
            self._is_over = True
            raise
        self._is_submitted = True
        if self._is_over:  # closed by another task meanwhile
            llm._thread.abandon(mailbox)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            await self.start()
            assert self._mailbox is not None
            output = await self._mailbox.get()
        except BaseException:  # a cancelled task too
            self._leave()
            raise
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """End the request, unless it has ended."""
        self._leave()

    def _leave(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._is_submitted and self._mailbox is not None:
                self._llm._thread.abandon(self._mailbox)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()
