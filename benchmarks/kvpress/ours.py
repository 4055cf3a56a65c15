"""Our side: the same cases through the engine, every context cut down once, at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.kvpress.cases import Case, Found
from vtoken.engine.llm import LLM
from vtoken.evals.evaluate import run_probes
from vtoken.evals.task import Probe, scores_of

NEVER: Final = 10**6  # a stride that no text reaches: what follows the context loses nothing more


def run_cases(llm: LLM, cases: Sequence[Case], policy: str | None, kept: int) -> list[Found]:
    """Of each case what `press.run_case` says of it. Raises RuntimeError where another number of tokens was kept."""
    probes = []
    for case in cases:  # a context that is scored and asked about is read once: the second text finds it cached
        prompt = case.context + case.given
        probes.append(Probe(prompt + case.scored, len(case.context), is_scored=True))
        if case.kind == "needle":
            probes.append(Probe(prompt, len(case.context), max_tokens=len(case.scored)))
    retention: dict[str, Any] = {}
    if policy is not None:
        retention = {
            "kv_policy": policy,
            "kv_budget": kept,
            "kv_trigger": "always",
            "kv_stride": NEVER,
            "kv_prefill_stride": 0,
        }
    outputs = iter(run_probes(llm, probes, retention))
    found = []
    for case in cases:
        scored = next(outputs)
        evicted = scored.outputs[0].num_evicted
        if policy is not None and len(case.context) - evicted != kept:
            raise RuntimeError(f"{policy} kept {len(case.context) - evicted} tokens of a context, not {kept}")
        logprob = math.fsum(scores_of(scored, len(case.context) + len(case.given)))
        # Whether a needle is found is asked of an answer that is drawn; nobody asks it of a running text.
        drawn = next(outputs).outputs[0].token_ids if case.kind == "needle" else []
        found.append(Found(logprob, drawn == case.scored))
    return found
