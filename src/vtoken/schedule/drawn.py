"""Drawn tokens: each is appended to its text, and some texts end with theirs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.schedule.lane_state import LaneState
from vtoken.schedule.sequence import FinishReason, Sequence


def enter_tokens(
    draws: list[Sequence], tokens: NDArray[np.int32], state: LaneState, eos: NDArray[np.int64]
) -> tuple[list[Sequence], list[tuple[Sequence, FinishReason]]]:
    """Append the `tokens` [n] to the texts of the n `draws`; `eos` are the stop ids of the model.

    Returns the sequences that got their first token, and those that are complete, with the reason.
    """
    lanes = np.array([sequence.lane for sequence in draws], np.int64)
    state["total"][lanes] += 1
    state["last_token"][lanes] = tokens
    drawn = tokens.tolist()
    for sequence, token in zip(draws, drawn, strict=True):
        sequence.token_ids.append(token)
    is_first = state["total"][lanes] - state["prompt"][lanes] == 1
    stops = np.isin(tokens, eos) & ~state["ignore_eos"][lanes]
    for i in np.flatnonzero(state["own_stops"][lanes]).tolist():
        stops[i] |= drawn[i] in draws[i].request.stop_token_ids
    for i in np.flatnonzero(stops).tolist():
        draws[i].has_stop_id = True
    for i in np.flatnonzero(~stops & state["constrained"][lanes]).tolist():
        rules = draws[i].request.rules
        assert rules is not None, "it is constrained"
        stops[i] = rules.is_over(draws[i])
    ended = []
    for i in np.flatnonzero(stops | (state["total"][lanes] >= state["limit"][lanes])).tolist():
        if drawn[i] in draws[i].request.stop_token_ids:
            draws[i].stop_reason = drawn[i]
        ended.append((draws[i], FinishReason.STOP if stops[i] else FinishReason.LENGTH))
    return [draws[i] for i in np.flatnonzero(is_first).tolist()], ended
