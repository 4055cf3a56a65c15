"""`Demand`: the blocks that a request must find to start, or to come back."""

from __future__ import annotations

from collections import Counter

from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.prefix_cache import PrefixEntry
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.sequence import Request, Status


class Demand:
    """Only asks: nothing in the books changes. `num_others` are the requests that run: each is left a block when a
    preempted one comes back, or that would soon have to go again."""

    def __init__(self, config: SchedulerConfig, memory: KVCacheManager) -> None:
        self._config = config
        self._memory = memory

    def match(self, request: Request) -> list[PrefixEntry]:
        """The cached blocks that a request can begin with."""
        leader, goal = request.leader, _tokens_to_start(request)
        leader.hashes.extend(leader.token_ids, goal)
        # One token is always left to compute, and what follows a death was computed without the dead.
        limits = [goal - 1, *leader.died_at.values()]
        if request.retention is not None:
            # What is cached would have to lie there at once, before any of it can die.
            limits += [request.retention.most_matched(request.num_prompt_tokens), self._peak(request)]
            if request.started_over_at >= leader.settled > 0:
                limits.append(0)  # it is computed again for what its policy did not see
        if request.prompt_scores is not None:
            limits.append(0)  # only what is computed can be scored
        return self._memory.match(leader.hashes, max(0, min(limits)))

    def reserve(self, request: Request, matched: list[PrefixEntry]) -> int:
        """Tokens for which a request needs blocks until its known text is computed: cells that die in blocks of others
        are not its own to use again. Others may come to share its blocks later: then the ladder has to help."""
        num_shared = sum(bool(self._memory.pool.refs[entry.block]) for entry in matched)
        return min(_tokens_to_start(request), self._peak(request) + num_shared * self._memory.block_size)

    def missing_to_start(self, request: Request, matched: list[PrefixEntry], num_others: int) -> int:
        """Blocks that are missing for a request to start; 0 or less: it can."""
        memory, reserve = self._memory, self.reserve(request, matched)
        needed = memory.blocks_to_admit(reserve, matched)
        if request.status is Status.PREEMPTED and num_others:  # alone it has the whole pool
            if request.unforked:
                needed += max(0, self._blocks_after_fork(request) - -(-reserve // memory.block_size))
            needed += num_others
        return needed - memory.num_available

    def blocks_to_swap_in(self, request: Request, num_others: int) -> int:
        """Blocks that must be available for a swapped request to come back."""
        # A block each to go on with, or it would be the first to be preempted again; alone it needs no such care.
        spare = num_others + len(request.lanes) if num_others else 0
        return len(self._memory.swap_blocks(request.lanes)) + spare

    def can_be_tight(self, request: Request, num_others: int) -> bool:
        """Whether a prompt may be cut at fixed places because its blocks are not there. Only one that never ran: what
        was settled without it cannot be repeated in fewer blocks."""
        retention = request.retention
        return (
            retention is not None
            and self._config.kv_mode == "vtoken"
            and (self._config.admission_evicts or not num_others)
            and retention.trigger == "pressure"
            and request.leader.settled == 0
            and not request.is_tight
        )

    def _peak(self, request: Request) -> int:
        """Tokens of a request that live at once, at most, until its known text is computed."""
        leader, retention, goal = request.leader, request.retention, _tokens_to_start(request)
        peak = _peak_live(leader.died_at, goal)
        if retention is None or self._config.kv_mode != "vtoken":
            return peak
        if request.is_tight or retention.trigger == "always":
            # What is settled dies as recorded; from there on the places decide.
            coming = [retention.peak_in_prompt(request.num_prompt_tokens)]
            if goal > request.num_prompt_tokens:
                coming.append(retention.peak_after_prompt(goal))
            return min(peak, max(_peak_live(leader.died_at, min(goal, leader.settled)), *coming))
        if request.started_over_at >= leader.settled > 0:
            return min(peak, leader.settled)  # there its policy will be asked
        return peak

    def _blocks_after_fork(self, request: Request) -> int:
        """Blocks, at most, that choices hold together when each has computed its known answer again."""
        size, prompt, choices = self._memory.block_size, request.num_prompt_tokens, request.unfinished
        shared = prompt // size
        lengths = [max(prompt, len(choice.token_ids)) for choice in choices]  # who never forked has none yet
        whole = shared + sum(-(-length // size) - shared for length in lengths)
        retention = request.retention
        if retention is None or self._config.kv_mode != "vtoken":
            return whole
        peaks = [_peak_live(choice.died_at, length, prompt) for choice, length in zip(choices, lengths, strict=True)]
        if retention.trigger == "always":
            peaks = [min(peak, retention.peak_after_prompt(n)) for peak, n in zip(peaks, lengths, strict=True)]
        # Those that live in the prompt may lie in blocks that all share, besides.
        return min(whole, shared + sum(-(-peak // size) for peak in peaks))


def _tokens_to_start(request: Request) -> int:
    """Tokens that the leader computes before the other choices join it, or all that are known."""
    return request.num_prompt_tokens if request.unforked else len(request.leader.token_ids)


def _peak_live(died_at: dict[int, int], length: int, first: int = 0) -> int:
    """Most tokens live at once while a text grows to `length` tokens, which die as recorded, once it has `first`."""
    peak, dead = 0, 0
    for died, count in sorted(Counter(died_at.values()).items()):
        if died > length:
            break
        if died > first:
            peak = max(peak, died - dead)
        dead += count
    return max(peak, length - dead)
