"""`Engine`: requests in, steps, outputs out. One thread, no waiting: whoever owns it decides when to step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from vtoken.base.clock import Clock, MonotonicClock
from vtoken.base.errors import EngineError, RequestError
from vtoken.base.hashing import mix64
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.validation import shorten
from vtoken.engine.bad_words import tokens_of
from vtoken.engine.interrupts import HeldInterrupt
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.prompts import Prompt, encode_prompt
from vtoken.engine.stats import EngineStats, StepFacts
from vtoken.engine.structured import Grammars
from vtoken.engine.text import Tokenizer
from vtoken.engine.tracked import OutputKind, Tracked
from vtoken.executor.base import Executor
from vtoken.schedule.logit_rules import ends_of
from vtoken.schedule.plan import StepPlan
from vtoken.schedule.scheduler import Scheduler
from vtoken.schedule.sequence import Request, Sequence
from vtoken.schedule.text_rules import TextRules


@dataclass(frozen=True)
class EngineFacts:
    """What an engine is told about the model that its parts do not know."""

    vocab_size: int
    bos_token_id: int | None
    bytes_per_block: int
    weight_bytes: int
    max_logprobs: int = 20


@dataclass(frozen=True)
class CheckedRequest:
    """A request that has passed every check that does not depend on what else is there."""

    request_id: str
    text: str | None  # None: it came as token ids
    token_ids: list[int]
    params: SamplingParams
    output_kind: OutputKind
    cache_salt: str | None
    text_rules: TextRules


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
        self.grammars = Grammars(tokenizer, facts.vocab_size, scheduler.config.eos_token_ids)
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._clock = clock or MonotonicClock()
        self._num_requests = 0
        self._busy_seconds = 0.0
        self._tracked: dict[Request, Tracked] = {}  # not by id: that of an aborted request may be in use again
        # Made, and not yet returned: Ctrl-C came at the end of their step.
        self._outputs: list[tuple[Request, RequestOutput]] = []
        self.last_step = StepFacts(self._clock.now(), 0, [], [])
        """For whoever watches the engine, in its thread."""
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
        request a token, "delta" gives then what is new, "final" only the last output, as do requests with `best_of`
        or `use_beam_search`. Texts with different `cache_salt` never share cached blocks.

        Raises RequestError, with the field at fault, for anything that could not run; nothing is queued then.
        """
        self.add(self.check_request(request_id, prompt, params, output_kind=output_kind, cache_salt=cache_salt))

    def check_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        cache_salt: str | None = None,
    ) -> CheckedRequest:
        """The first half of `add_request`: tokenize, and refuse what could not run. `add` queues it.

        Looks at nothing that a step changes, so any thread may call it at any time.
        """
        if self.is_closed:
            raise EngineError("this engine is closed; make a new one")
        params = self.check_parameters(request_id, params, output_kind=output_kind, cache_salt=cache_salt)
        facts = self.facts
        token_ids = encode_prompt(prompt, self.tokenizer, vocab_size=facts.vocab_size, bos_token_id=facts.bos_token_id)
        self.scheduler.check_request(len(token_ids), params)
        text = prompt if isinstance(prompt, str) else None
        text_rules = self._text_rules(params)
        return CheckedRequest(request_id, text, token_ids, params, output_kind, cache_salt, text_rules)

    def check_parameters(
        self, request_id: str, params: SamplingParams | None, *, output_kind: OutputKind, cache_salt: str | None
    ) -> SamplingParams:
        """What is to be used as `params`. Raises RequestError for what is wrong whatever the prompt; for any thread."""
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id: expected text that is not empty, got {request_id!r}", "request_id")
        if output_kind not in get_args(OutputKind):
            expected = ", ".join(map(repr, get_args(OutputKind)))
            raise RequestError(f"output_kind: expected one of {expected}, got {output_kind!r}", "output_kind")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: expected SamplingParams, got {shorten(params)}", "params")
        params.check_vocabulary(self.facts.vocab_size)
        self._check_logprobs(params)
        self._check_width(params)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop: this engine has no tokenizer (skip_tokenizer_init=True), so no text; use stop_token_ids", "stop"
            )
        _check_salt(cache_salt)
        return params

    def add(self, checked: CheckedRequest) -> Request:
        """Queue what `check_request` found fine. Raises RequestError for an id that is in use."""
        if self.is_closed:
            raise EngineError("this engine is closed; make a new one")
        seed = checked.params.seed
        if seed is None:
            seed = int(mix64(self._seed & (2**64 - 1), self._num_requests))
        request = self.scheduler.add(
            checked.request_id,
            checked.token_ids,
            checked.params,
            seed=seed,
            cache_salt=checked.cache_salt,
            text_rules=checked.text_rules,
        )
        self._num_requests += 1
        # Which choices are the best is known in the end.
        is_ranked = checked.params.num_choices > checked.params.n or checked.params.use_beam_search
        kind = "final" if is_ranked else checked.output_kind
        self._tracked[request] = Tracked(request, checked.text, kind, self.tokenizer)
        return request

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
        return [output for _, output in self.advance()]

    def advance(self) -> list[tuple[Request, RequestOutput]]:
        """`step`, with the request of each output: by the time its end is told its id may be in use again."""
        with HeldInterrupt():
            started, computed = self._clock.now(), self.scheduler.counters.tokens_computed
            plan = self.scheduler.schedule()
            drawn = [] if plan is None else self._run(plan)
            self._outputs += self._report(drawn, self.scheduler.counters.tokens_computed - computed)
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

    def _report(self, drawn: list[tuple[Sequence, int]], num_tokens: int) -> list[tuple[Request, RequestOutput]]:
        """`num_tokens` went through the model."""
        advanced: dict[Request, Tracked] = {}
        for sequence, token in drawn:
            tracked = self._tracked[sequence.request]
            stop = tracked.push(sequence, token)
            if stop is not None:
                self.scheduler.stop(sequence, stop)
            if tracked.kind != "final":
                advanced[sequence.request] = tracked
        finished = self.scheduler.take_finished()
        self.last_step = StepFacts(self._clock.now(), num_tokens, [sequence for sequence, _ in drawn], finished)
        for request in finished:
            advanced[request] = self._tracked.pop(request)
        return [(request, tracked.output(self.scheduler.died_at)) for request, tracked in advanced.items()]

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
            waiting_by_reason=scheduler.waiting_by_reason(),
            max_num_seqs=scheduler.config.max_num_seqs,
            num_copies_pending=len(memory.moves),
            copies=self.executor.copy_counts(),
            reclaim_decisions=memory.decisions.counts.copy(),
            memory=memory.counters.copy(),
            scheduler=scheduler.counters.copy(),
            busy_seconds=self._busy_seconds,
        )

    def close(self) -> None:
        """End what still runs, and give the executor's memory and threads back. May be called twice."""
        if not self.is_closed:
            try:
                self.abort_request([request.request_id for request in self._tracked])
            finally:
                self.is_closed = True
                self.executor.close()

    def _text_rules(self, params: SamplingParams) -> TextRules:
        """What a request says in text about its answers. Raises RequestError for what cannot be had."""
        if params.bad_words and self.tokenizer is None:
            raise RequestError(
                "bad_words: this engine has no tokenizer (skip_tokenizer_init=True), so no words; use logit_bias",
                "bad_words",
            )
        words = () if self.tokenizer is None else tokens_of(params.bad_words, self.tokenizer)
        return TextRules(words, self.grammars.constraint(params))

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


def _check_salt(salt: str | None) -> None:
    if salt is not None:
        try:
            salt.encode()
        except (AttributeError, UnicodeEncodeError):
            raise RequestError("cache_salt: expected text", "cache_salt") from None
