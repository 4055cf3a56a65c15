"""What lm-eval asks of a model, asked of an `LLM`. lm-eval itself is not needed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vtoken.base.sampling_params import SamplingParams
from vtoken.engine.llm import LLM
from vtoken.engine.outputs import RequestOutput

Pair = tuple[list[int], list[int]]  # token ids: a context, and what is scored behind it


def score(llm: LLM, pairs: Sequence[Pair], max_length: int) -> list[tuple[float, bool]]:
    """Of what is scored behind each context: (log-probability in nats, whether every token of it was the likeliest).

    Only the last `max_length + 1` tokens of a pair are read, since the last of them is predicted and not read. Raises
    ValueError for a pair of which that leaves nothing to score or no context, RuntimeError for a request that fails.
    """
    for context, scored in pairs:
        if not context or not 0 < len(scored) <= max_length:
            raise ValueError(
                f"expected a context and 1 to {max_length} tokens to score, got {len(context)} and {len(scored)}"
            )
    prompts = [(context + scored)[-max_length - 1 :] for context, scored in pairs]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for output, (_, scored) in zip(_answers(llm, prompts, [params] * len(prompts)), pairs, strict=True):
        assert output.prompt_logprobs is not None
        places = output.prompt_logprobs[-len(scored) :]
        tokens = [place[token] for place, token in zip(places, scored, strict=True) if place is not None]
        found.append((math.fsum(token.logprob for token in tokens), all(token.rank == 1 for token in tokens)))
    return found


def generate(
    llm: LLM, contexts: Sequence[list[int]], settings: Sequence[Mapping[str, Any]], max_model_len: int
) -> list[str]:
    """The text behind each context. `settings` are lm-eval's, normalized by it: `until`, `max_gen_toks`, `temperature`,
    `do_sample`; all others are fields of `SamplingParams`. A long context loses its beginning.

    Raises ValueError where `max_gen_toks` leaves no room for a context, RuntimeError for a request that fails.
    """
    prompts, params = [], []
    for context, each in zip(contexts, settings, strict=True):
        rest = {name: value for name, value in each.items() if name not in ("until", "max_gen_toks", "do_sample")}
        num_tokens = int(each["max_gen_toks"])
        room = max_model_len - num_tokens
        if room < 1:
            raise ValueError(f"max_gen_toks: {num_tokens} tokens leave no room for a context in {max_model_len}")
        prompts.append(context[-room:])
        params.append(SamplingParams(max_tokens=num_tokens, stop=tuple(filter(None, each["until"])), **rest))
    return [output.outputs[0].text for output in _answers(llm, prompts, params)]


def _answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    if not prompts:
        return []
    outputs = llm.generate(prompts, params)
    for i, output in enumerate(outputs):
        if output.error is not None:
            raise RuntimeError(f"request {i} of {len(outputs)} failed: {output.error}")
    return outputs
