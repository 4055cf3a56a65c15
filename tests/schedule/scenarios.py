"""Random loads for the scheduler: what arrives when, what is aborted, what fails, what is evicted."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tests.driving import DrawFailure, Driver, StepFailure, evict_scattered, mix, tokens
from vtoken.base.errors import RequestError
from vtoken.policies.h2o import H2O
from vtoken.schedule.plan import StepPlan
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.retention import KEEPS_ALL, RetentionSettings
from vtoken.schedule.sequence import FinishReason, Request, Sequence

_SMALL_VOCABULARY = 100  # so that end-of-sequence and stop tokens are drawn now and then


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario. Texts of the same family begin alike, so that prefixes are shared."""

    step: int
    in_flight: bool  # it comes while a step is under way, if there is one
    family: int
    shared: int  # tokens of the family's common text
    own: int  # tokens of its own after them
    max_tokens: int
    n: int
    temperature: float
    salt: str | None
    ignore_eos: bool
    stops: tuple[int, ...]
    abort_after: int | None  # steps after its arrival, 0 = before it ever ran
    abort_in_flight: bool
    breaks_at: int | None  # tokens of the answer after which every step that it runs in fails
    breaks: str  # "draw", or how far the step got: "nothing", "copies", "forward"
    kv: dict[str, Any]  # what it says of eviction


@dataclass(frozen=True)
class Scenario:
    """A machine, settings and a load."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    preemption: str
    enable_prefix_caching: bool
    max_num_seqs: int
    spare_tokens: int  # of the step's budget, beyond one a sequence
    max_passes: int
    evict_every: int | None
    evict_in_prompt: bool
    evict_percent: int
    failing_steps: frozenset[int]  # steps that fail once, nobody's fault
    statistics: bool
    kv: dict[str, Any]  # `SchedulerConfig`
    beside_delay: int
    budget: int | None  # of all requests that say nothing else: texts may be longer than the pool
    arrivals: tuple[Arrival, ...] = field(default=())


def arrivals(max_len: int, max_n: int) -> st.SearchStrategy[Arrival]:
    rarely = st.integers(0, 6).map(lambda x: x == 6)
    return st.builds(
        Arrival,
        step=st.integers(0, 12),
        in_flight=st.booleans(),
        family=st.integers(0, 2),
        shared=st.integers(0, max_len // 2),
        own=st.integers(1, max_len // 2),
        max_tokens=st.integers(1, max_len),
        n=st.integers(1, max_n),
        temperature=st.sampled_from([0.0, 1.0]),
        salt=st.sampled_from([None, None, "a", "b"]),
        ignore_eos=st.booleans(),
        stops=st.sampled_from([(), (), (7,)]),
        abort_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 40)),
        abort_in_flight=st.booleans(),
        breaks_at=rarely.flatmap(lambda breaks: st.integers(0, 10) if breaks else st.none()),
        breaks=st.sampled_from(["draw", "nothing", "copies", "forward"]),
        kv=st.one_of(st.just({}), retentions()),
    )


def retentions() -> st.SearchStrategy[dict[str, Any]]:
    """Policies of all kinds: none, sums, windows, from the cache, of whole blocks."""
    policies = ["random", "h2o", "tova:recent=2", "snapkv:window=3", "knorm", "keydiff", "paged_eviction"]
    return st.fixed_dictionaries(
        {
            "kv_policy": st.sampled_from(policies),
            "kv_budget": st.one_of(st.integers(5, 30), st.sampled_from([0.3, 0.7])),
            "kv_trigger": st.sampled_from(["always", "pressure"]),
            "kv_stride": st.one_of(st.integers(4, 16), st.sampled_from([30, 60, 2**31 - 1])),
            "kv_prefill_stride": st.sampled_from([0, 5, 16]),
            "kv_pin": st.sampled_from([(), (), [(0, 2)]]),
        }
    )


@st.composite
def scenarios(draw: st.DrawFn, max_requests: int = 10) -> Scenario:
    block_size = draw(st.sampled_from([4, 5, 8, 16]))
    num_blocks = draw(st.integers(2, 24))
    max_n = draw(st.sampled_from([1, 1, 2, 4]))
    evicts = draw(st.sampled_from(["by order", "by policy", "by policy", "never"]))
    keeps_little = evicts == "by policy" and num_blocks >= 6 and draw(st.booleans())
    longest = min(120, num_blocks * block_size * 2) if keeps_little else min(60, num_blocks * block_size * 3 // 5)
    incoming = draw(st.lists(arrivals(longest, max_n), min_size=1, max_size=max_requests))
    if evicts != "by policy":
        incoming = [replace(arrival, kv={}) for arrival in incoming]
    return Scenario(
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=draw(st.sampled_from([0, 3, num_blocks, num_blocks])),
        preemption=draw(st.sampled_from(["recompute", "swap", "swap", "auto"])),
        enable_prefix_caching=draw(st.booleans()),
        max_num_seqs=draw(st.integers(max_n, 8)),
        spare_tokens=draw(st.sampled_from([0, 3, 20, 100])),
        max_passes=draw(st.sampled_from([0, 1, 16])),
        evict_every=draw(st.integers(1, 20)) if evicts == "by order" else None,
        evict_in_prompt=draw(st.booleans()),
        evict_percent=draw(st.sampled_from([10, 50, 90])),
        statistics=evicts == "never" and draw(st.booleans()),
        budget=draw(st.integers(6, max(6, (num_blocks - 3) * block_size // 2))) if keeps_little else None,
        kv={
            "kv_mode": "vtoken"
            if keeps_little
            else draw(st.sampled_from(["vtoken", "vtoken", "vtoken", "naive", "repack", "native"])),
            "kv_copies": draw(st.sampled_from(["ordered", "ordered", "beside"])),
            "on_pressure": draw(st.sampled_from(["evict", "evict", "preempt"])),
            "admission_evicts": draw(st.booleans()),
        },
        beside_delay=draw(st.integers(0, 2)),
        failing_steps=draw(st.frozensets(st.integers(0, 40), max_size=2)),
        arrivals=tuple(incoming),
    )


def check_deaths(request: Request, sequence: Sequence) -> None:
    """Nobody falls below the budget, nothing protected dies, and with fixed places tokens die at those alone."""
    retention = request.retention
    if retention is None:
        return
    policy, alive = retention.policy, 0
    last, prompt = 0, request.num_prompt_tokens
    pinned = {position for start, end in retention.pins for position in range(start, end)}
    for length, count in sorted(Counter(sequence.died_at.values()).items()):
        if retention.trigger == "always":
            place = last
            while place < length:  # places at which nothing had to die
                reached = retention.next_place(place, alive, prompt)
                alive += reached - place
                place = reached
            assert place == length, f"tokens died at {length}, which is no place"
        else:
            alive += length - last
        alive, last = alive - count, length
        budget = retention.budget_at(length)
        assert alive >= budget or policy.whole_blocks, f"{alive} live at {length}, the budget is {budget}"
        if retention.trigger == "always" and not policy.whole_blocks:
            # A share of a text that is still short may be less than what is protected.
            protected = policy.sinks + policy.num_recent(budget) + len(pinned)
            assert alive <= max(budget, protected), f"{alive} live at {length}, the budget is {budget}"
        dead = [position for position, died in sequence.died_at.items() if died == length]
        assert not pinned & set(dead)
        assert min(dead) >= policy.sinks
        assert max(dead) < length - policy.num_recent(budget)


class ScenarioRun:
    """Plays a scenario and checks, at the end, all that is promised of any load."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.driver = Driver(
            num_blocks=scenario.num_blocks,
            block_size=scenario.block_size,
            num_host_blocks=scenario.num_host_blocks,
            preemption=scenario.preemption,
            enable_prefix_caching=scenario.enable_prefix_caching,
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.max_num_seqs + scenario.spare_tokens,
            max_passes=scenario.max_passes,
            eos=frozenset({3}),
            vocab_size=_SMALL_VOCABULARY,
            retention=self._retention(),
            max_model_len=None if scenario.budget is None else 2 * scenario.num_blocks * scenario.block_size,
            # Such that sequences of more than about 20 tokens are swapped.
            costs=PreemptionCosts(100, scenario.block_size, 1000 / scenario.block_size, 1.0, 0.1, 10.0),
            evictor=None
            if scenario.evict_every is None
            else evict_scattered(scenario.evict_every, scenario.evict_percent, in_prompt=scenario.evict_in_prompt),
            fault=self._fault,
            kv=scenario.kv,
            beside_delay=scenario.beside_delay,
        )
        self.added: dict[Request, Arrival] = {}
        self.aborted: set[Request] = set()
        self._aborts: dict[int, list[Request]] = defaultdict(list)  # by the step at which they come

    def _retention(self) -> RetentionSettings:
        scenario = self.scenario
        if scenario.budget is not None:
            return RetentionSettings(H2O(), scenario.budget, "pressure", scenario.block_size, scenario.block_size)
        return RetentionSettings(H2O(), budget=1_000_000, trigger="always") if scenario.statistics else KEEPS_ALL

    def play(self) -> ScenarioRun:
        scenario, driver = self.scenario, self.driver
        due = defaultdict(list)
        for arrival in scenario.arrivals:
            due[arrival.step].append(arrival)
        now, last = 0, max(due)
        while now <= last or driver.scheduler.num_unfinished:
            for arrival in due[now]:
                if not arrival.in_flight:
                    self._arrive(arrival, now)
            for request in self._aborts[now]:
                if not self.added[request].abort_in_flight:
                    self._abort(request)
            if driver.scheduler.num_unfinished:
                driver.step(in_flight=lambda now=now: self._while_in_flight(now, due[now]))
            else:
                self._while_in_flight(now, due[now])
            now += 1
            assert driver.counters.steps <= self._most_steps(), "no end in sight"
        self._check()
        return self

    def _most_steps(self) -> int:
        """Each failed step costs everybody a recompute, one after the other."""
        # A prompt that loses tokens is cut at places, and with copies beside the steps somebody may wait for them.
        cuts = sum(request.num_prompt_tokens for request in self.driver.requests if request.retention is not None)
        waits = (1 + self.scenario.beside_delay) if self.scenario.kv["kv_copies"] == "beside" else 1
        return 3 * waits * (self.driver.solo_steps() + cuts) * (1 + self.driver.counters.failed_steps) + 50

    def _while_in_flight(self, now: int, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            if arrival.in_flight:
                self._arrive(arrival, now)
        for request in self._aborts[now]:
            if self.added[request].abort_in_flight:
                self._abort(request)

    def _arrive(self, arrival: Arrival, now: int) -> None:
        request = self._add(arrival)
        if request is not None and arrival.abort_after is not None:
            self._aborts[now + arrival.abort_after].append(request)

    def _add(self, arrival: Arrival) -> Request | None:
        prompt = tokens(arrival.shared, arrival.family, vocab_size=_SMALL_VOCABULARY)
        prompt += tokens(arrival.own, arrival.family, len(self.added), 1, vocab_size=_SMALL_VOCABULARY)
        try:
            request = self.driver.add(
                prompt,
                arrival.max_tokens,
                n=arrival.n,
                temperature=arrival.temperature,
                cache_salt=arrival.salt,
                ignore_eos=arrival.ignore_eos,
                stop_token_ids=arrival.stops,
                **arrival.kv,
            )
        except RequestError:  # too large for this pool; what is refused, and how, is tested for itself
            return None
        self.added[request] = arrival
        return request

    def _abort(self, request: Request) -> None:
        was_live = not all(sequence.is_finished for sequence in request.sequences)
        assert self.driver.scheduler.abort(request.request_id) == was_live
        if was_live:
            self.aborted.add(request)

    def _fault(self, plan: StepPlan, ran: list[Request]) -> StepFailure | DrawFailure | None:
        for request in ran:
            arrival = self.added[request]
            if arrival.breaks_at is not None and any(
                s.num_output_tokens >= arrival.breaks_at for s in request.unfinished
            ):
                name = f"request {request.request_id} breaks"
                return DrawFailure(request, name) if arrival.breaks == "draw" else StepFailure(name, arrival.breaks)
        if plan.step in self.scenario.failing_steps:
            return StepFailure("nobody's fault", ("nothing", "copies", "forward")[mix(plan.step) % 3])
        return None

    def _check_places(self, request: Request) -> None:
        """What dies at fixed places, and so the answer, depends on the request alone: not on who failed beside it."""
        retention, reasons = request.retention, {FinishReason.STOP, FinishReason.LENGTH}
        is_whole = all(sequence.finish_reason in reasons for sequence in request.sequences)
        if retention is None or retention.trigger == "pressure" or not is_whole or retention.policy.whole_blocks:
            return
        alone = Driver(num_blocks=200, block_size=self.scenario.block_size, eos=self.driver.eos,
                       vocab_size=_SMALL_VOCABULARY, enable_prefix_caching=False, checks=False,
                       max_num_batched_tokens=512, max_model_len=400)  # fmt: skip
        [settings] = [arrival.kv for added, arrival in self.added.items() if added is request]
        again = alone.add(request.prompt_token_ids, request.params.max_tokens, n=request.params.n, seed=request.seed,
                          temperature=request.params.temperature, ignore_eos=request.params.ignore_eos,
                          stop_token_ids=request.params.stop_token_ids, **settings)  # fmt: skip
        alone.run()
        assert [sequence.died_at for sequence in again.sequences] == [s.died_at for s in request.sequences]

    def _check(self) -> None:
        self.driver.check_outputs()
        self.driver.check_idle()
        for request in self.added:
            for sequence in request.sequences:
                check_deaths(request, sequence)
        for request in self.added:
            self._check_places(request)
        for request, arrival in self.added.items():
            reasons = {sequence.finish_reason for sequence in request.sequences}
            if FinishReason.ABORT in reasons:
                assert request in self.aborted
            if FinishReason.ERROR in reasons:
                assert request.error is not None
                if "nobody's fault" in request.error:  # it was alone in a step that failed
                    continue
                assert arrival.breaks_at is not None, f"fell with another one: {request.error}"
                assert f"request {request.request_id} breaks" in request.error
