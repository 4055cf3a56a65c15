"""`Engine`: requests in, steps, outputs out. One thread, no waiting: whoever owns it decides when to step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from vtoken.base.clock import Clock, MonotonicClock
from vtoken.base.errors import EngineError, RequestError, describe
from vtoken.base.hashing import mix64
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.validation import shorten
from vtoken.engine.interrupts import HeldInterrupt
from vtoken.engine.logprobs import best_choices, name_prompt_scores, name_scores
from vtoken.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from vtoken.engine.stats import EngineStats
from vtoken.engine.stops import find_stop, without_beginning_of
from vtoken.engine.text import IncrementalDetokenizer, Tokenizer, prompt_of_nothing
from vtoken.executor.base import Executor
from vtoken.schedule.logit_rules import ends_of
from vtoken.schedule.plan import StepPlan
from vtoken.schedule.scheduler import Scheduler
from vtoken.schedule.sequence import FinishReason, Request, Sequence

OutputKind = Literal["cumulative", "final"]
Prompt = str | SequenceOf[int]


@dataclass(frozen=True)
class EngineFacts:
    """What an engine is told about the model that its parts do not know."""

    vocab_size: int
    bos_token_id: int | None
    bytes_per_block: int
    weight_bytes: int
    max_logprobs: int = 20


class Engine:
    """Continuous batching over one scheduler and one executor.

    Use: `add_request`, then `step` while `has_unfinished_requests()`. A request that fails ends with finish_reason
    "error"; the others, and the engine, go on. `LLM` wraps this for lists of prompts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        facts: EngineFacts,
        *,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.facts = facts
        self.tokenizer = tokenizer
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._clock = clock or MonotonicClock()
        self._num_requests = 0
        self._busy_seconds = 0.0
        self._tracked: dict[Request, _Tracked] = {}  # not by id: that of an aborted request may be in use again
        self._outputs: list[RequestOutput] = []  # made, and not yet returned: Ctrl-C came at the end of their step
        self.is_closed = False

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        `prompt` is text or token ids. `output_kind`: "cumulative" gives an output after every step that brought the
        request a token, "final" only the last one, as do requests with `best_of` or `use_beam_search`. Texts
        with different `cache_salt` never share cached blocks.

        Raises RequestError, with the field at fault, for anything that could not run; nothing is queued then.
        """
        if self.is_closed:
            raise EngineError("this engine is closed; make a new one")
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id: expected text that is not empty, got {request_id!r}", "request_id")
        if output_kind not in get_args(OutputKind):
            raise RequestError(f"output_kind: expected 'cumulative' or 'final', got {output_kind!r}", "output_kind")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: expected SamplingParams, got {shorten(params)}", "params")
        params.check_vocabulary(self.facts.vocab_size)
        self._check_logprobs(params)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop: this engine has no tokenizer (skip_tokenizer_init=True), so no text; use stop_token_ids", "stop"
            )
        _check_salt(cache_salt)
        token_ids = self._encode(prompt)
        seed = params.seed
        if seed is None:
            seed = int(mix64(self._seed & (2**64 - 1), self._num_requests))
        self._check_width(params)
        request = self.scheduler.add(request_id, token_ids, params, seed=seed, cache_salt=cache_salt)
        self._num_requests += 1
        text = prompt if isinstance(prompt, str) else None
        # Which choices are the best is known in the end.
        kind = "final" if params.num_choices > params.n or params.use_beam_search else output_kind
        self._tracked[request] = _Tracked(request, text, kind, self.tokenizer)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests, in whatever state, and give their blocks back. Unknown and ended ones are no error.

        The next `step` returns their last outputs, with finish_reason "abort".
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            self.scheduler.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._tracked or self._outputs)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests it brought a token (those that asked for it) and those that ended.

        What the executor raises ends one request at most. Ctrl-C waits until the step is over, whose outputs then come
        with the next one.
        """
        with HeldInterrupt():
            started = self._clock.now()
            plan = self.scheduler.schedule()
            self._outputs += self._report([] if plan is None else self._run(plan))
            self._await_copies()
            self._busy_seconds += self._clock.now() - started
        if plan is None and self.scheduler.num_unfinished:
            raise EngineError(f"nothing can run, but {self.scheduler.num_unfinished} requests are left: a bug of ours")
        outputs, self._outputs = self._outputs, []
        return outputs

    def _await_copies(self) -> None:
        """Copies beside the steps may outlive the last request, and hold on to their blocks. They take milliseconds;
        one that does not end is heard of when the next request comes."""
        for _ in range(1000):
            plan = None if self.scheduler.num_unfinished else self.scheduler.schedule()
            if plan is None:
                return
            self._run(plan)
            time.sleep(0.0002)

    def _run(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """The tokens drawn; none if the step failed, which ends one request at most."""
        try:
            return self.scheduler.apply(self.executor.execute(plan))
        except BaseException as error:
            self.scheduler.fail(error)
            if not isinstance(error, Exception):
                raise
            return []

    def _report(self, drawn: list[tuple[Sequence, int]]) -> list[RequestOutput]:
        advanced: dict[Request, _Tracked] = {}
        for sequence, token in drawn:
            tracked = self._tracked[sequence.request]
            if tracked.is_read:
                stop = tracked.push(sequence, token)
                if stop is not None:
                    self.scheduler.stop(sequence, stop)
            if tracked.kind == "cumulative":
                advanced[sequence.request] = tracked
        for request in self.scheduler.take_finished():
            advanced[request] = self._tracked.pop(request)
        return [tracked.output(self.scheduler.died_at) for tracked in advanced.values()]

    def stats(self) -> EngineStats:
        """What the memory holds now, and what happened so far."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        return EngineStats(
            usage=memory.usage(),
            num_host_blocks=memory.host_pool.num_blocks,
            free_host_blocks=memory.host_pool.num_free,
            bytes_per_block=self.facts.bytes_per_block,
            weight_bytes=self.facts.weight_bytes,
            max_model_len=scheduler.config.max_model_len,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_preempted=scheduler.num_preempted,
            memory=memory.counters.copy(),
            scheduler=scheduler.counters.copy(),
            busy_seconds=self._busy_seconds,
        )

    def close(self) -> None:
        """End what still runs, and give the executor's memory and threads back. May be called twice."""
        if not self.is_closed:
            self.abort_request([request.request_id for request in self._tracked])
            self.is_closed = True
            self.executor.close()

    def _check_logprobs(self, params: SamplingParams) -> None:
        for field in ("logprobs", "prompt_logprobs"):
            wanted, most = getattr(params, field), self.facts.max_logprobs
            if wanted is not None and wanted > most:
                raise RequestError(f"{field}: {wanted} is more than this engine's max_logprobs={most}", field)

    def _check_width(self, params: SamplingParams) -> None:
        """Beams that differ need so many tokens to begin with."""
        num_ends = len(ends_of(params, self.scheduler.config.eos_token_ids))
        most = (self.facts.vocab_size - num_ends) // max(2, 1 + num_ends)
        if params.use_beam_search and params.num_choices > most:
            message = (
                f"use_beam_search: {params.num_choices} beams are more than this model's vocabulary allows: {most}"
            )
            raise RequestError(message, "use_beam_search")

    def _encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, each of them in the vocabulary, whoever made them."""
        largest = self.facts.vocab_size - 1
        token_ids = self._tokenize(prompt)
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise RequestError(f"prompt: expected whole numbers as token ids, got {shorten(token)}", "prompt")
            if not 0 <= token <= largest:
                message = f"prompt: token ids go from 0 to {largest} (the vocabulary), got {shorten(token)}"
                raise RequestError(message, "prompt")
        return [int(token) for token in token_ids]

    def _tokenize(self, prompt: Prompt) -> list[Any]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt: this engine has no tokenizer (skip_tokenizer_init=True); send token ids", "prompt"
                )
            return self.tokenizer.encode(prompt)
        is_row = isinstance(prompt, np.ndarray) and prompt.ndim == 1
        if not is_row and (isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, SequenceOf)):
            raise RequestError(f"prompt: expected text or token ids, got {shorten(prompt)}", "prompt")
        return list(prompt) if len(prompt) else prompt_of_nothing(self.facts.bos_token_id)


def _check_salt(salt: str | None) -> None:
    if salt is not None:
        try:
            salt.encode()
        except (AttributeError, UnicodeEncodeError):
            raise RequestError("cache_salt: expected text", "cache_salt") from None


class _Tracked:
    """A request that the engine owes outputs, and the text of its choices so far."""

    def __init__(self, request: Request, prompt: str | None, kind: OutputKind, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.kind = kind
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._text_error: str | None = None
        self._texts = [""] * len(request.sequences)
        self._stops: dict[int, str] = {}  # choice -> the text that ended it, where one did
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in request.sequences]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.is_read = tokenizer is not None and (kind == "cumulative" or bool(request.params.stop))
        """Whether its text is made token by token."""
        self._detokenizers = [
            IncrementalDetokenizer(tokenizer) if tokenizer is not None and self.is_read else None
            for _ in request.sequences
        ]

    def push(self, sequence: Sequence, token: int) -> str | None:
        """Add a token's text. Returns the one of the `stop` texts that it completes, which ends the choice."""
        choice, params = sequence.choice, self.request.params
        detokenizer = self._detokenizers[choice]
        if detokenizer is None or self._text_error is not None or choice in self._stops:
            return None
        with self._text_errors_kept():
            piece = detokenizer.push(token)
            before, self._texts[choice] = len(self._texts[choice]), self._texts[choice] + piece
            if piece and sequence.num_output_tokens >= params.min_tokens:
                found = find_stop(self._texts[choice], before, params.stop)
                if found is not None:
                    at, stop = found
                    self._texts[choice] = self._texts[choice][: at + len(stop) * params.include_stop_str_in_output]
                    self._stops[choice] = stop
                    return stop
        return None

    def _text(self, sequence: Sequence) -> str:
        if sequence.choice in self._stops:
            return self._texts[sequence.choice]
        if not sequence.is_finished and not self.request.params.include_stop_str_in_output:
            return without_beginning_of(self.request.params.stop, self._texts[sequence.choice])
        if sequence.is_finished and self._tokenizer is not None and self._text_error is None:
            with self._text_errors_kept():
                return self._tokenizer.decode(sequence.output_token_ids)
        return self._texts[sequence.choice]

    def _finish_reason(self, sequence: Sequence) -> str | None:
        if sequence.finish_reason is None:
            return None
        # A stop text may have been completed by the very token at which the length was reached.
        return (FinishReason.STOP if sequence.choice in self._stops else sequence.finish_reason).value

    def _scores(self, sequence: Sequence) -> list[TokenLogprobs] | None:
        if self.request.params.logprobs is None:
            return None
        named, scores = self._logprobs[sequence.choice], sequence.scores
        for place in range(len(named), len(scores)):  # those that have not been named yet
            token = sequence.token_ids[self.request.num_prompt_tokens + place]
            named += name_scores([token], scores[place], self._text_of)
        return named.copy()

    def _prompt_scores(self) -> list[TokenLogprobs | None] | None:
        if self._prompt_logprobs is None:
            request = self.request
            self._prompt_logprobs = name_prompt_scores(request.prompt_token_ids, request.prompt_scores, self._text_of)
        return self._prompt_logprobs

    def _text_of(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)

    @contextmanager
    def _text_errors_kept(self) -> Iterator[None]:
        """A tokenizer that fails on one answer must not cost the others theirs: it is said in this one's `error`."""
        try:
            yield
        except Exception as error:
            self._text_error = f"the answer could not be turned into text: {describe(error)}"

    def output(self, died_at: Callable[[Sequence], dict[int, int]]) -> RequestOutput:
        request = self.request
        shown = best_choices(request)
        is_scored = request.params.num_logprobs >= 0 or request.beam_search is not None
        texts = [self._text(sequence) for sequence in shown]
        deaths = [died_at(sequence) for sequence in shown]
        choices = [
            CompletionOutput(
                index=index,
                text=text,
                token_ids=sequence.output_token_ids,
                finish_reason=self._finish_reason(sequence),
                stop_reason=self._stops.get(sequence.choice, sequence.stop_reason),
                error=request.error or self._text_error,
                logprobs=self._scores(sequence),
                cumulative_logprob=sequence.total_logprob if is_scored else None,
                died_at=died,
                num_kept=len(sequence.token_ids) - len(died),
                num_evicted=len(died),
            )
            for index, (sequence, text, died) in enumerate(zip(shown, texts, deaths, strict=True))
        ]
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=choices,
            finished=not request.unfinished,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=self._prompt_scores(),
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=request.first_token_time,
                finished_time=request.finish_time,
                num_preemptions=request.num_preemptions,
            ),
        )
