"""What the scheduler knows of each lane, as arrays, so that a step costs a few numpy calls and no loop over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.schedule.sequence import Sequence

NEVER = np.iinfo(np.int32).max

_FIELDS = np.dtype(
    [
        ("total", np.int32),  # tokens known: prompt and answer
        ("limit", np.int32),  # the sequence ends when `total` reaches it
        ("cut", np.int32),  # no chunk goes past this length: something is to happen there first
        ("computed", np.int32),  # tokens that are there for good; the books count those of a step in flight too
        ("prompt", np.int32),
        ("last_token", np.int32),
        ("ignore_eos", np.bool_),
        ("own_stops", np.bool_),  # has stop tokens of its own
        ("constrained", np.bool_),  # must have a form, and ends when that is complete
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("choice", np.int32),
        ("num_logprobs", np.int32),  # likeliest tokens that are named beside what is drawn; -1 = no scores
        ("is_beam", np.bool_),
        ("arrival", np.int64),
        ("rope_length", np.int32),  # see `Request.rope_length`; 0 = none
        ("num_unforked", np.int32),  # choices that are still to fork from it
        # Eviction; see `Retention`.
        ("policy", np.int32),  # index in `Evictor.policies`, -1 = every token is kept
        ("budget", np.int32),  # in tokens; 0 = the share decides
        ("share", np.float64),
        ("stride", np.int32),
        ("at_places", np.bool_),  # tokens die at fixed lengths, the next of which is `place`; else under pressure
        ("place", np.int32),
        ("scanned", np.int32),  # up to this position its policy was told what lies in the cache
        ("settled", np.int32),  # see `Sequence.settled`, as it was when the lane was opened
        # Queries whose attention was gathered for a policy that acts under pressure, and those for which it was not.
        ("observed", np.int32),
        ("missed", np.int32),
    ]
)


_KEEPS_ALL = (-1, 0, 0.0, 1, False, NEVER, 0, 0, 0, 0)  # of the last ten fields


class LaneState:
    """Scheduling state by lane. `state["total"][lanes]` reads a field of many lanes at once."""

    def __init__(self) -> None:
        self._fields: NDArray[Any] = np.zeros(8, _FIELDS)
        self.sequences: list[Sequence | None] = [None] * 8

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._fields[name]

    def open(self, lane: int, sequence: Sequence, limit: int) -> None:
        if lane >= len(self._fields):
            wanted = 2 * max(lane, len(self._fields))
            self._fields = np.concatenate((self._fields, np.zeros(wanted - len(self._fields), _FIELDS)))
            self.sequences += [None] * (wanted - len(self.sequences))
        params = sequence.request.params
        self._fields[lane] = (
            len(sequence.token_ids),
            limit,
            NEVER,
            0,
            sequence.request.num_prompt_tokens,
            sequence.token_ids[-1],
            params.ignore_eos,
            bool(params.stop_token_ids),
            sequence.request.rules is not None and sequence.request.rules.is_constrained,
            params.temperature,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
            np.uint64(sequence.request.seed & 0xFFFFFFFFFFFFFFFF),
            sequence.choice,
            params.num_logprobs,
            params.use_beam_search,
            sequence.request.index,
            sequence.request.rope_length or 0,
            len(sequence.request.unforked),
            *_KEEPS_ALL,
        )
        self._fields["settled"][lane] = sequence.settled
        self.sequences[lane] = sequence
        sequence.lane = lane

    def fork(self, lane: int, twin: int, sequence: Sequence) -> None:
        """Open a lane for a sequence that has become the same as the one in `lane`."""
        self.open(twin, sequence, 0)
        self._fields[twin] = self._fields[lane]
        self._fields["choice"][twin] = sequence.choice

    def budgets(self, lanes: NDArray[np.int64], lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """[n] live tokens that are to stay of texts that are `lengths` [n] tokens long."""
        shares = np.ceil(self["share"][lanes] * lengths).astype(np.int32)
        return np.maximum(np.where(self["budget"][lanes] > 0, self["budget"][lanes], shares), 1)

    def close(self, lane: int) -> None:
        sequence = self.sequences[lane]
        assert sequence is not None, f"lane {lane} is not open"
        self.sequences[lane], sequence.lane = None, None

    def of(self, lane: int) -> Sequence:
        sequence = self.sequences[lane]
        assert sequence is not None, f"lane {lane} is not open"
        return sequence
