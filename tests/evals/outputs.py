"""`RequestOutput`s as an engine makes them, for tests of what is read out of them."""

from __future__ import annotations

from collections.abc import Sequence

from vtoken.engine.outputs import CompletionOutput, Logprob, RequestOutput


def answered(text: str, token_ids: Sequence[int] = ()) -> RequestOutput:
    choice = CompletionOutput(index=0, text=text, token_ids=list(token_ids), finish_reason="length")
    return RequestOutput("0", None, [], [choice], finished=True)


def scored(logprobs: Sequence[float]) -> RequestOutput:
    """Of a prompt whose first token has no score, and the others these."""
    choice = CompletionOutput(index=0, text="", token_ids=[0], finish_reason="length")
    prompt = [0] * (1 + len(logprobs))
    named = [{0: Logprob(value, 1)} for value in logprobs]
    return RequestOutput("0", None, prompt, [choice], finished=True, prompt_logprobs=[None, *named])
