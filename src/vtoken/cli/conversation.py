"""`Conversation`: what `vtoken chat` remembers from turn to turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken.base.errors import EngineError, RequestError

if TYPE_CHECKING:
    from vtoken.base.sampling_params import SamplingParams
    from vtoken.engine.llm import LLM
    from vtoken.engine.outputs import RequestOutput


@dataclass(frozen=True)
class Turn:
    """One message, and what was answered to it."""

    output: RequestOutput
    is_full: bool  # no room is left for another word
    tokens_per_second: float  # of the answer, after its first token
    first_token_seconds: float  # from the message to the first token

    @property
    def is_cut(self) -> bool:
        return self.output.outputs[0].finish_reason == "length"

    @property
    def num_tokens(self) -> int:
        """Of the conversation when the turn had ended."""
        return len(self.output.prompt_token_ids) + len(self.output.outputs[0].token_ids)


class Conversation:
    """Messages so far, and the engine that goes on with them.

    Each turn sends the whole text, and the prefix cache has what was computed of it. With eviction a turn starts from
    the whole text too: what an earlier answer lost is there again for the next.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, chat_template: str | None) -> None:
        self.system = system
        self.last: Turn | None = None
        self._llm = llm
        self._params = params
        self._template = chat_template
        self._messages: list[dict[str, str]] = []

    @property
    def num_messages(self) -> int:
        return len(self._messages)

    def reset(self) -> None:
        """Forget all messages; what the model is told first stays."""
        self._messages, self.last = [], None

    def ask(self, text: str, show: Callable[[str], None]) -> Turn:
        """Send a message, `show` the answer piece by piece, and remember both. Ctrl-C ends the answer where it is.

        Raises RequestError for a message that cannot be answered and EngineError for one that failed; then nothing is
        remembered.
        """
        from vtoken.engine.outputs import join_deltas

        engine, question = self._llm.engine, {"role": "user", "content": text}
        token_ids = self._encode([*self._messages, question])
        deltas: list[RequestOutput] = []
        try:
            engine.add_request("turn", token_ids, self._params, output_kind="delta")
            while engine.has_unfinished_requests():
                for delta in engine.step():
                    deltas.append(delta)
                    show(delta.outputs[0].text)
        except BaseException as error:  # nothing of it may be left behind
            engine.abort_request("turn")
            while engine.has_unfinished_requests():
                deltas += engine.step()
            if not isinstance(error, KeyboardInterrupt) or not deltas:
                raise
        output = join_deltas(deltas)
        if output.error is not None:
            raise EngineError(output.error)
        self._messages += [question, {"role": "assistant", "content": output.outputs[0].text}]
        self.last = _turn(output, engine.scheduler.config.max_model_len)
        return self.last

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        told = [] if self.system is None else [{"role": "system", "content": self.system}]
        token_ids = self._llm.get_tokenizer().encode_chat([*told, *messages], chat_template=self._template)
        most = self._llm.engine.scheduler.config.max_model_len
        if len(token_ids) >= most:
            raise RequestError(
                f"with this message the conversation has {len(token_ids)} tokens, and an answer needs room below "
                f"max_model_len={most}; /reset starts a new one"
            )
        return token_ids


def _turn(output: RequestOutput, max_model_len: int) -> Turn:
    times, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    first = seconds = 0.0
    if times is not None and times.first_token_time is not None and times.finished_time is not None:
        first = times.first_token_time - times.arrival_time
        seconds = times.finished_time - times.first_token_time
    speed = (num_tokens - 1) / seconds if seconds else 0.0
    return Turn(output, len(output.prompt_token_ids) + num_tokens >= max_model_len, speed, first)
