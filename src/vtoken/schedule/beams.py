"""`Beams`: carries out what beam searches decide, by forks and releases.

A request with `use_beam_search` has a sequence for each beam. They are computed like any others, but none of them gets
a token before all have named their likeliest continuations: then those from which nothing goes on give back their
blocks and fork from one of which more than one continuation lives on. A fork shares every block; whoever writes into a
shared block that is not full copies it, so a divergence costs one block at most (the PagedAttention paper, figure 9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.beam_search import BeamSearch, Continuation, FinishedAnswer
from vtoken.schedule.lane_state import LaneState
from vtoken.schedule.plan import Candidates
from vtoken.schedule.sequence import Request, Sequence


class Beams:
    """The beams of running requests, between two steps."""

    def __init__(self, memory: KVCacheManager, state: LaneState) -> None:
        self._memory = memory
        self._state = state

    def take(self, draws: SequenceOf[Sequence], searched: NDArray[np.int64], found: Candidates) -> list[Request]:
        """Enter what beams name, which are the draws `searched`. Returns the requests of which all beams have."""
        complete: list[Request] = []
        if not len(searched):
            return complete
        for draw, tokens, logprobs in zip(searched.tolist(), found.tokens, found.logprobs, strict=True):
            request = draws[draw].request
            if not request.is_finished:
                wanted = search_of(request).num_candidates
                if search_of(request).offer(draws[draw].choice, tokens[:wanted], logprobs[:wanted]):
                    complete.append(request)
        return complete

    def advance(self, request: Request) -> bool:
        """Let the best continuations of a request's beams live on. Returns whether the search is over; then its
        sequences hold what was found, best first, in lanes that are theirs no longer in meaning."""
        search, length = search_of(request), request.sequences[0].num_output_tokens + 1
        ended, running = search.decide(length)
        search.finish([self._answer(request.sequences[each.beam], each, length) for each in ended])
        if search.is_over(running, length):
            return True
        heirs = search.assign(running, length)
        if length > 1:
            self._inherit(request, heirs)
        for beam, each in heirs.items():
            sequence = request.sequences[beam]
            sequence.token_ids.append(each.token)
            sequence.total_logprob = each.total
            self._state["total"][sequence.lane] += 1
            self._state["last_token"][sequence.lane] = each.token
        return False

    def _answer(self, sequence: Sequence, last: Continuation, length: int) -> FinishedAnswer:
        assert sequence.lane is not None, "a beam that has named continuations has been computed"
        assert last.ends is not None
        is_own = last.token in sequence.request.stop_token_ids
        return FinishedAnswer(
            [*sequence.output_token_ids, last.token],
            last.total,
            search_of(sequence.request).score(last.total, length),
            last.ends,
            last.token if is_own else None,
            sequence.died_at | self._memory.tokens.died_at(sequence.lane),
        )

    def _inherit(self, request: Request, heirs: dict[int, Continuation]) -> None:
        """Beams that go on from another one fork from it; first all of them give back what they held."""
        heirless = [request.sequences[beam] for beam, each in heirs.items() if each.beam != beam]
        for sequence in heirless:
            lane = sequence.lane
            assert lane is not None, "a beam that runs has a lane"
            self._state.close(lane)
            self._memory.release([lane])
        for sequence in heirless:
            parent = request.sequences[heirs[sequence.choice].beam]
            assert parent.lane is not None, "a beam that runs has a lane"
            sequence.token_ids = parent.token_ids.copy()
            sequence.hashes = parent.hashes.copy()
            sequence.died_at = parent.died_at.copy()
            sequence.settled = parent.settled
            self._state.fork(parent.lane, self._memory.fork(parent.lane), sequence)


def search_of(request: Request) -> BeamSearch:
    assert request.beam_search is not None, "only who asked for beams has draws that are searched"
    return request.beam_search


def num_candidates(requests: Iterable[Request]) -> int:
    return max((search_of(request).num_candidates for request in requests), default=0)
