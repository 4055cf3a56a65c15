"""Planted bugs: each must be caught by the driver (answers, books or ends), on a load that passes without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.driving import Driver, StepFailure, evict_every_other_prompt, evict_scattered, tokens
from vtoken.executor.sim import SimExecutor
from vtoken.memory.copy import CopyKind
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.prefix_cache import PrefixCache
from vtoken.schedule.batch import PlanBuilder
from vtoken.schedule.plan import StepPlan
from vtoken.schedule.scheduler import Scheduler
from vtoken.schedule.sequence import Request
from vtoken.schedule.timeline import Timeline

Patch = pytest.MonkeyPatch

# --- loads ------------------------------------------------------------------------------------------------------------


def crowd(**settings: object) -> Driver:
    return Driver(**{"num_blocks": 35, "block_size": 4, "max_num_batched_tokens": 48, **settings}).add_crowd()


def crowds(**settings: object) -> None:
    """In pools so small that everything happens, though not in each."""
    for num_blocks in (28, 30, 32, 34, 36):
        crowd(num_blocks=num_blocks, num_host_blocks=num_blocks, **settings).run()


def plain() -> None:
    crowd(num_blocks=200).run()


def tight() -> None:
    crowds(evictor=evict_every_other_prompt())


def swapping() -> None:
    crowds(evictor=evict_every_other_prompt(), preemption="swap")


def swapping_in_waves() -> None:
    crowds(evictor=evict_scattered(5, 20), preemption="swap")


def failing() -> None:
    for step in range(1, 30, 4):
        crowd(
            evictor=evict_every_other_prompt(),
            fault=lambda plan, ran, step=step: StepFailure() if plan.step == step else None,
        ).run()


def failing_when_swapping() -> None:
    """The first step that swaps fails before a copy has run."""
    driver = crowd(num_host_blocks=35, preemption="swap")

    def fault(plan: StepPlan, ran: list[Request]) -> StepFailure | None:
        swaps = any(copy.kind is CopyKind.SWAP_OUT for copy in plan.copies)
        return StepFailure() if swaps and not driver.counters.failed_steps else None

    driver.fault = fault
    driver.run()
    assert driver.counters.failed_steps == 1


def evicted_and_sent_again() -> None:
    """A text is sent again after its holes were filled with other tokens."""
    driver = Driver(block_size=4, evictor=lambda sequence, length: range(1, 15) if length == 16 else ())
    driver.add(tokens(16, 1), 20)
    driver.run()
    driver.evictor = None
    driver.add(tokens(20, 1), 4)
    driver.run()


def answer_sent_again() -> None:
    """One of two choices lost tokens of the prompt, in blocks that both hold; then the answers come back as prompts."""
    driver = Driver(
        block_size=4,
        evictor=lambda sequence, length: range(1, 15) if (length, sequence.choice) == (16, 1) else (),
    )
    request = driver.add(tokens(16, 1), 20, n=2, temperature=1.0)
    driver.run()
    driver.evictor = None
    for choice in request.sequences:
        driver.add([*tokens(16, 1), *choice.output_token_ids], 4)
    driver.run()


def aborts() -> None:
    driver = crowd()
    for victim in ("1", "2", "4"):
        driver.step()
        driver.step(in_flight=lambda victim=victim: driver.scheduler.abort(victim))
    driver.run()


# --- bugs -------------------------------------------------------------------------------------------------------------


def after(owner: type, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """Let `change(self, result)` replace what a method returns."""
    original = getattr(owner, name)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, original(self, *args, **kwargs))

    return lambda patch: patch.setattr(owner, name, patched)


def instead(owner: type, name: str, method: Callable[..., Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, method)


def plan_changed(**changes: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return after(
        PlanBuilder, "build", lambda self, plan: replace(plan, **{name: f(plan) for name, f in changes.items()})
    )


def without(*kinds: CopyKind) -> Callable[[Patch], None]:
    return plan_changed(copies=lambda plan: tuple(copy for copy in plan.copies if copy.kind not in kinds))


def sampling_changed(**changes: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return plan_changed(sampling=lambda plan: replace(plan.sampling, **{name: f(plan) for name, f in changes.items()}))


def extend_with_late_masks(self: KVCacheManager, placement: Any) -> Any:
    """The snapshot is taken after the new tokens were entered."""
    extension = _extend(self, placement)
    num_entries = extension.block_tables.shape[1]
    return replace(extension, past_masks=self.blocks.masks[placement.lanes, :num_entries])


def schedule_with_late_tables(self: Scheduler) -> Any:
    """The block tables are read when the books have already moved on."""
    plan = _schedule(self)
    if plan is None:
        return None
    for lane in self.memory.used_lanes:
        if self.memory.tokens.evicted[lane]:
            self.memory.reclaim([lane])
    return replace(plan, block_tables=self.memory.blocks.ids[plan.lanes, : plan.block_tables.shape[1]])


def swap_out_after_the_forward_pass(patch: Patch) -> None:
    execute, run_copies = SimExecutor.execute, SimExecutor._run_copies

    def late(self: SimExecutor, plan: Any) -> Any:
        swaps = tuple(copy for copy in plan.copies if copy.kind is CopyKind.SWAP_OUT)
        result = execute(self, replace(plan, copies=tuple(copy for copy in plan.copies if copy not in swaps)))
        run_copies(self, replace(plan, copies=swaps))
        return result

    patch.setattr(SimExecutor, "execute", late)


def deaths_are_forgotten(patch: Patch) -> None:
    patch.setattr(Timeline, "_repeat_deaths", lambda self, sequence, length: None)
    patch.setattr(Timeline, "_repeat_common_deaths", lambda self, sequence, length: None)


def abort_at_once(self: Scheduler, request_id: str) -> bool:
    flight, self._flight = self._flight, None
    try:
        return _abort(self, request_id)
    finally:
        self._flight = flight


def publish_whatever_was_lost(self: KVCacheManager, lane: int, hashes: Any) -> None:
    evicted, self.tokens.evicted[lane] = self.tokens.evicted[lane], False
    try:
        _publish(self, lane, hashes)
    finally:
        self.tokens.evicted[lane] = evicted


_extend, _publish = KVCacheManager.extend, KVCacheManager.publish
_schedule, _abort = Scheduler.schedule, Scheduler.abort

MUTANTS: dict[str, tuple[Callable[[Patch], None], Callable[[], None]]] = {
    "masks include the new tokens": (instead(KVCacheManager, "extend", extend_with_late_masks), plain),
    "masks lack the oldest token": (
        plan_changed(masks=lambda plan: plan.masks & ~np.eye(1, plan.masks.shape[1], dtype=np.uint32)[..., None]),
        plain,
    ),
    "tables are read late": (instead(Scheduler, "schedule", schedule_with_late_tables), tight),
    "positions count live tokens": (plan_changed(positions=lambda plan: plan.positions - (plan.positions > 20)), plain),
    "no copy on write": (without(CopyKind.COPY_ON_WRITE), plain),
    "no relocation": (without(CopyKind.RELOCATE), tight),
    "nothing is swapped out": (without(CopyKind.SWAP_OUT), swapping),
    "nothing is swapped in": (without(CopyKind.SWAP_IN), swapping),
    "swapped out after the forward pass": (swap_out_after_the_forward_pass, swapping),
    "copies in the wrong order": (plan_changed(copies=lambda plan: plan.copies[::-1]), swapping_in_waves),
    "all choices draw from one stream": (
        sampling_changed(choices=lambda plan: np.zeros_like(plan.sampling.choices)),
        plain,
    ),
    "the stream depends on the lane": (
        sampling_changed(seeds=lambda plan: plan.sampling.seeds + plan.lanes[plan.sampling.slices].astype(np.uint64)),
        plain,
    ),
    "the stream depends on the step": (
        sampling_changed(indices=lambda plan: np.full_like(plan.sampling.indices, plan.step)),
        plain,
    ),
    "a draw from another slice": (sampling_changed(slices=lambda plan: plan.sampling.slices[::-1]), plain),
    "deaths are not replayed": (deaths_are_forgotten, tight),
    "an evicted sequence publishes": (
        instead(KVCacheManager, "publish", publish_whatever_was_lost),
        answer_sent_again,
    ),
    "published blocks are written": (
        instead(PrefixCache, "forget_block", lambda self, block: None),
        evicted_and_sent_again,
    ),
    "pending entries outlive a failed step": (instead(KVCacheManager, "withdraw", KVCacheManager.commit), failing),
    "copies of a failed step are taken for done": (
        instead(PlanBuilder, "add_copy", lambda self, copy, requests: self.copies.append(copy)),
        failing_when_swapping,
    ),
    "an abort does not wait for the step": (instead(Scheduler, "abort", abort_at_once), aborts),
}


@pytest.mark.parametrize("load", dict.fromkeys(load for _, load in MUTANTS.values()), ids=lambda load: load.__name__)
def test_the_loads_pass_without_a_bug(load: Callable[[], None]) -> None:
    load()


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, load = MUTANTS[name]
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, TypeError)):
        load()
