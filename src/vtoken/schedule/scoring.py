"""Scores: what requests with `prompt_logprobs` are told of their prompts, and those with `logprobs` of what is drawn.

The token at position `p` is scored with the logits of the one before it, so with all that this one could read, and
nothing else: not with what died before.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from vtoken.schedule.lane_state import LaneState
from vtoken.schedule.plan import NOTHING_TO_SCORE, ScoringBatch, StepPlan, StepResult, TokenScores
from vtoken.schedule.sequence import Request, Sequence

_NO_NUMBER = (
    "prompt_logprobs: the model's logits hold NaN or infinite values, so tokens of this prompt have no probability; "
    "with dtype='float16' numbers may overflow: try 'bfloat16' or 'float32'"
)


def order_scores(
    state: LaneState, lanes: NDArray[np.int64], starts: NDArray[np.int32], positions: NDArray[np.int32]
) -> ScoringBatch:
    """What the slices of a plan are to score: slice `s` computes the tokens at `positions[starts[s] : starts[s + 1]]`
    of the text in `lanes[s]`."""
    after, targets, num_top = [], [], 0
    for s in np.flatnonzero(positions[starts[:-1]] < state["prompt"][lanes] - 1).tolist():  # the rest is past prompts
        request = state.of(int(lanes[s])).request
        if request.prompt_scores is None:
            continue
        num_top = max(num_top, request.prompt_scores.num_top)
        begin, first = int(starts[s]), int(positions[starts[s]])
        next_tokens = request.prompt_token_ids[first + 1 : int(positions[starts[s + 1] - 1]) + 2]
        after.append(np.arange(begin, begin + len(next_tokens), dtype=np.int32))
        targets.append(np.array(next_tokens, np.int32))
    return ScoringBatch(np.concatenate(after), np.concatenate(targets), num_top) if after else NOTHING_TO_SCORE


def enter_scores(plan: StepPlan, result: StepResult, state: LaneState) -> dict[Request, str]:
    """Give requests the scores of their prompts. Returns those whose logits were no numbers, and why."""
    if not len(plan.scoring):
        return {}
    after, failed = plan.scoring.after, {}
    slices = np.searchsorted(plan.starts, after, side="right") - 1
    for s in np.unique(slices).tolist():
        request = state.of(int(plan.lanes[s])).request
        assert request.prompt_scores is not None, "only who asked for scores has them ordered"
        found = result.scores.of(slices == s)
        request.prompt_scores.enter(plan.positions[after[slices == s]] + 1, found)
        if np.isnan(found.logprobs).any():
            failed[request] = _NO_NUMBER
    return failed


def enter_drawn(draws: SequenceOf[Sequence], scored: NDArray[np.int64], drawn: TokenScores) -> None:
    """Give sequences the scores of the tokens they have just got; `scored` are the draws that have one."""
    for i, draw in enumerate(scored.tolist()):
        sequence = draws[draw]
        if not sequence.request.is_finished:
            sequence.scores.append(drawn.of(slice(i, i + 1), sequence.request.params.num_logprobs))
            sequence.total_logprob += float(drawn.logprobs[i])
