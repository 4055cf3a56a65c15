"""The requests of the engine that answer one request of a client: one for each prompt, all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from vtoken.engine.async_llm import RequestStream
from vtoken.engine.outputs import RequestOutput
from vtoken.server.errors import check_outcome
from vtoken.server.protocol.common import PromptTokensDetails, Usage


async def start_all(streams: Sequence[RequestStream]) -> None:
    """Check and queue all. If one is refused, or the caller is cancelled, none is left."""
    try:
        for stream in streams:
            await stream.start()
    except BaseException:
        await leave_all(streams)
        raise


async def leave_all(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        await stream.aclose()


async def finish_all(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The whole answers, of streams with `output_kind="final"`. Raises what `check_outcome` raises; then all end."""
    try:
        await start_all(streams)
        outputs = [await stream.__anext__() for stream in streams]  # all run; each waits in its mailbox
        for output in outputs:
            check_outcome(output)
        return outputs
    finally:
        await leave_all(streams)


async def read_all(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(place of the stream, what is new there), as it comes, of streams that were started. Leaves them at the end.

    Raises what `check_outcome` raises.
    """
    if len(streams) == 1:
        try:
            async for output in streams[0]:
                check_outcome(output)
                yield 0, output
        finally:
            await leave_all(streams)
        return
    # Short, so that what a slow client has not taken stays in mailboxes, where it is joined.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue(1)
    readers = [asyncio.ensure_future(_read_into(queue, place, stream)) for place, stream in enumerate(streams)]
    running = len(streams)
    try:
        while running:
            place, news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            output = news
            check_outcome(output)
            running -= output.finished
            yield place, output
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await leave_all(streams)


async def _read_into(
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException]], place: int, stream: RequestStream
) -> None:
    try:
        async for output in stream:
            await queue.put((place, output))
    except Exception as error:
        await queue.put((place, error))


class Tally:
    """Counts the tokens of all prompts and choices, from deltas or from whole answers."""

    def __init__(self, counts_answers: bool = True) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._counts_answers = counts_answers  # not where the one token that was drawn is left out
        self._answers = self._kept = self._evicted = 0

    def add(self, place: int, output: RequestOutput) -> None:
        """`place`: of the prompt in the request."""
        self._prompts[place] = len(output.prompt_token_ids)
        self._cached[place] = output.num_cached_tokens
        for choice in output.outputs:
            unsaid = 0 if self._counts_answers else len(choice.token_ids)
            self._answers += len(choice.token_ids) - unsaid
            self._kept += max(0, choice.num_kept - unsaid)
            self._evicted += choice.num_evicted

    def usage(self) -> Usage:
        prompts = sum(self._prompts.values())
        return Usage(
            prompt_tokens=prompts,
            completion_tokens=self._answers,
            total_tokens=prompts + self._answers,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
            kept_tokens=self._kept,
            evicted_tokens=self._evicted,
        )
