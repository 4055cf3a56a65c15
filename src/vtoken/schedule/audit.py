"""Checks that scheduler, books and results agree."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vtoken.base.errors import EngineError, InvariantError
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.lane_state import LaneState
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.residents import Residents
from vtoken.schedule.sequence import Request


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Refuse a result that cannot be that plan's before any of it is entered."""
    if len(result.tokens) != len(plan.sampling):
        raise EngineError(f"step {plan.step} draws {len(plan.sampling)} tokens, its result has {len(result.tokens)}")
    ordered = {order.statistic.name: len(order.slices) for order in plan.statistics}
    found = {name: len(values) for name, values in result.statistics.items()}
    if ordered != found:
        raise EngineError(f"step {plan.step} ordered statistics of so many slices: {ordered}; its result has {found}")
    if result.candidates.tokens.shape != (len(plan.sampling.searched), plan.sampling.num_candidates):
        raise EngineError(
            f"step {plan.step} searches {len(plan.sampling.searched)} beams for {plan.sampling.num_candidates} "
            f"candidates each, its result has {list(result.candidates.tokens.shape)}"
        )
    wanted = len(plan.scoring), len(plan.sampling.scored)
    if (len(result.scores), len(result.drawn)) != wanted:
        raise EngineError(
            f"step {plan.step} scores {wanted[0]} known tokens and {wanted[1]} drawn ones, its result has "
            f"{len(result.scores)} and {len(result.drawn)} of them"
        )


def check_books(
    memory: KVCacheManager, state: LaneState, requests: Mapping[str, Request], residents: Residents
) -> None:
    """Raise InvariantError if the scheduler and the books disagree; `requests` are all that are not finished. Slow."""
    memory.check()
    lengths, cut = memory.tokens.lengths, state["cut"]
    lanes = [lane for request in requests.values() for lane in request.lanes]
    _require(sorted(lanes) == memory.used_lanes, "lanes of requests and lanes in the books differ")
    for lane in lanes:
        sequence = state.of(lane)
        _require(sequence.lane == lane, f"lane {lane} is filed under another sequence")
        _require(state["total"][lane] == len(sequence.token_ids), f"lane {lane}: texts differ")
        # A swapped sequence may stand at its cut: what is due there happens when it is back.
        _require(lengths[lane] <= cut[lane], f"lane {lane} has gone past what was to happen at {cut[lane]}")
    queues = (*residents.waiting, *residents.running, *residents.preempted)
    ids = [request.request_id for request in queues]
    _require(sorted(ids) == sorted(requests), "a request is in no queue, or in two")
    num_running = sum(len(request.unfinished) for request in residents.running)
    _require(residents.num_running == num_running, "sequences that run are counted wrongly")


def _require(condition: bool | np.bool_, what: str) -> None:
    if not condition:
        raise InvariantError(what)
