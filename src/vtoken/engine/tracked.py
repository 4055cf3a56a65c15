"""`Tracked`: a request that the engine owes outputs, and what of its answers is said in the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from vtoken.base.errors import describe
from vtoken.base.sampling_params import SamplingParams
from vtoken.engine.logprobs import best_choices, name_prompt_scores, name_scores
from vtoken.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from vtoken.engine.stops import find_stop, without_beginning_of
from vtoken.engine.text import IncrementalDetokenizer, Tokenizer
from vtoken.schedule.sequence import FinishReason, Request, Sequence

OutputKind = Literal["cumulative", "delta", "final"]
DiedAt = Callable[[Sequence], dict[int, int]]


class AnswerText:
    """The text of one choice, token by token: what of it may be shown, and the stop text that ended it."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop: str | None = None  # the text that ended it, once one did
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._params = params
        self._text = ""
        self._has_ended = False

    def push(self, token: int, num_tokens: int) -> str | None:
        """Add a token, the `num_tokens`-th of the choice. Returns the one of the `stop` texts that it completes."""
        if self.stop is not None:
            return None
        piece = self._detokenizer.push(token)
        before, self._text = len(self._text), self._text + piece
        if piece and num_tokens >= self._params.min_tokens:
            found = find_stop(self._text, before, self._params.stop)
            if found is not None:
                at, self.stop = found
                self._text = self._text[: at + len(self.stop) * self._params.include_stop_str_in_output]
        return self.stop

    def end(self) -> None:
        """No token follows: what was held back is released. May be called again."""
        if not self._has_ended:
            self._has_ended = True
            if self.stop is None:
                self._text += self._detokenizer.finish()

    @property
    def visible(self) -> str:
        """What may be shown: it only grows, and in the end it is the whole text."""
        if self._has_ended or self.stop is not None or self._params.include_stop_str_in_output:
            return self._text
        return without_beginning_of(self._params.stop, self._text)


class Tracked:
    """A request that the engine owes outputs.

    Every output is made here, so that what is said at once ("final"), again and again ("cumulative") and piece by piece
    ("delta") is the same text and the same tokens.
    """

    def __init__(self, request: Request, prompt: str | None, kind: OutputKind, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.kind = kind
        self._prompt = prompt
        self._prompt_token_ids = list(request.prompt_token_ids)  # one copy for all outputs
        self._tokenizer = tokenizer
        self._text_error: str | None = None
        self._answers: list[AnswerText] = []  # empty if its text is made in the end only
        if tokenizer is not None and (kind != "final" or request.params.stop):
            self._answers = [AnswerText(tokenizer, request.params) for _ in request.sequences]
        # Of each choice, tokens and characters that earlier deltas have said; always 0 for other kinds.
        self._said = [(0, 0)] * len(request.sequences)
        self._has_told_end = [False] * len(request.sequences)
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in request.sequences]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def push(self, sequence: Sequence, token: int) -> str | None:
        """Add a token's text. Returns the one of the `stop` texts that it completes, which ends the choice."""
        if self._answers and self._text_error is None and not self._hides_last(sequence):
            with self._text_errors_kept():
                return self._answers[sequence.choice].push(token, sequence.num_output_tokens)
        return None

    def output(self, died_at: DiedAt) -> RequestOutput:
        """What is to be said now: of all choices, or in a delta of those that have news."""
        request = self.request
        sequences = best_choices(request)
        if self.kind == "delta":
            sequences = [sequence for sequence in sequences if self._has_news(sequence)]
        is_first = not any(tokens for tokens, _ in self._said)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion(place, sequence, died_at) for place, sequence in enumerate(sequences)],
            finished=not request.unfinished,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=self._prompt_scores() if is_first else None,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=request.first_token_time,
                finished_time=request.finish_time,
                num_preemptions=request.num_preemptions,
            ),
        )

    def _has_news(self, sequence: Sequence) -> bool:
        if sequence.is_finished:
            return not self._has_told_end[sequence.choice]
        return sequence.num_output_tokens > self._said[sequence.choice][0]

    def _completion(self, place: int, sequence: Sequence, died_at: DiedAt) -> CompletionOutput:
        """`place` among the choices that are returned, the best ones perhaps."""
        choice, request = sequence.choice, self.request
        text = self._text(sequence)
        num_said, num_shown = self._said[choice]
        is_scored = request.params.num_logprobs >= 0 or request.beam_search is not None
        # In a delta the deaths come with the end: to list them costs as much as there are.
        tells_deaths = self.kind != "delta" or sequence.is_finished
        died = died_at(sequence) if tells_deaths else {}
        if self.kind == "delta":
            self._said[choice] = sequence.num_output_tokens, len(text)
            self._has_told_end[choice] = sequence.is_finished
        return CompletionOutput(
            index=choice if self.kind == "delta" else place,
            text=text[num_shown:],
            token_ids=sequence.token_ids[request.num_prompt_tokens + num_said :],
            finish_reason=self._finish_reason(sequence),
            stop_reason=self._stop(sequence) or sequence.stop_reason,
            error=request.error or self._text_error,
            logprobs=self._scores(sequence, num_said),
            cumulative_logprob=sequence.total_logprob if is_scored else None,
            died_at=died,
            num_kept=len(sequence.token_ids) - len(died) if tells_deaths else 0,
            num_evicted=len(died),
        )

    def _text(self, sequence: Sequence) -> str:
        if self._answers:
            answer = self._answers[sequence.choice]
            if sequence.is_finished and self._text_error is None:
                with self._text_errors_kept():
                    answer.end()
            return answer.visible
        if sequence.is_finished and self._tokenizer is not None and self._text_error is None:
            with self._text_errors_kept():
                token_ids = sequence.output_token_ids
                return self._tokenizer.decode(token_ids[:-1] if self._hides_last(sequence) else token_ids)
        return ""

    def _hides_last(self, sequence: Sequence) -> bool:
        """A stop id is a mark and no text, even where the tokenizer has one for it."""
        return sequence.has_stop_id and not self.request.params.include_stop_str_in_output

    def _stop(self, sequence: Sequence) -> str | None:
        return self._answers[sequence.choice].stop if self._answers else None

    def _finish_reason(self, sequence: Sequence) -> str | None:
        if sequence.finish_reason is None:
            return None
        # A stop text may have been completed by the very token at which the length was reached.
        return (sequence.finish_reason if self._stop(sequence) is None else FinishReason.STOP).value

    def _scores(self, sequence: Sequence, begin: int) -> list[TokenLogprobs] | None:
        """Of the tokens of the answer from the `begin`-th."""
        if self.request.params.logprobs is None:
            return None
        named, scores = self._logprobs[sequence.choice], sequence.scores
        for place in range(len(named), len(scores)):  # those that have not been named yet
            token = sequence.token_ids[self.request.num_prompt_tokens + place]
            named += name_scores([token], scores[place], self._text_of)
        return named[begin:]

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
