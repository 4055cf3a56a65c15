"""V12: what the token-level machinery costs is counted by `benchmarks/callgrind`; here, that it counts the right thing.

The count itself takes minutes below valgrind; its figure stands in docs/results.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.callgrind.counts import NOTHING, PARTS, cost, instructions, read_dump
from benchmarks.callgrind.plain_books import PlainBooks
from benchmarks.callgrind.variants import PASTS, replaced, write_sources
from tests.strategies import block_sizes
from vtoken.base.clock import ManualClock
from vtoken.base.sampling_params import SamplingParams
from vtoken.memory import bits
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.plan import StepPlan, StepResult
from vtoken.schedule.scheduler import Scheduler


def plans(books: type[KVCacheManager], block_size: int, lengths: list[int], steps: int) -> list[StepPlan]:
    """The plans of some sequences, prompts in chunks, answers of their own lengths."""
    memory = books(400, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(8, 32, 400), memory, ManualClock())
    for i, length in enumerate(lengths):
        scheduler.add(str(i), list(range(length)), SamplingParams(max_tokens=5 + 3 * i), seed=i)
    made = []
    for _ in range(steps):
        plan = scheduler.schedule()
        if plan is None:
            break
        made.append(plan)
        scheduler.apply(StepResult(plan.step, np.full(len(plan.sampling), plan.step, np.int32)))
    return made


@given(block_size=block_sizes(), lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6))
def test_plain_books_make_the_same_plans(block_size: int, lengths: list[int]) -> None:
    """So the yardstick does the whole job of a cache of blocks, and nothing but the masks is left out."""
    ours, plain = (plans(books, block_size, lengths, 40) for books in (KVCacheManager, PlainBooks))
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        for name in ("lanes", "starts", "token_ids", "positions", "write_slots", "write_rows", "block_tables"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert np.array_equal(a.past_live, b.past_live)
        # What the plain kernels read instead: all cells up to `past_live`.
        counted_on = np.arange(a.block_tables.shape[1] * block_size) < b.past_live[:, None]
        assert np.array_equal(bits.unpack(a.masks, block_size), counted_on)


def dump(name: str, total: int) -> str:
    return f"version: 1\ndesc: Trigger: Client Request: {name}\nevents: Ir\nfn=(1)\n0 5\ntotals: {total}\n"


def write_dumps(folder: Path, named: list[tuple[str, int]]) -> list[Path]:
    paths = [folder / f"callgrind.{i}" for i in range(len(named))]
    for path, (name, total) in zip(paths, named, strict=True):
        path.write_text(dump(name, total))
    return paths


def test_a_dump_is_read() -> None:
    assert read_dump(dump("schedule", 1234)) == ("schedule", 1234)
    assert read_dump("desc: Trigger: Program termination\ntotals: 9\n") == (None, 9)
    with pytest.raises(ValueError, match="without a total"):
        read_dump("desc: Trigger: Client Request: apply\n")


def test_instructions_are_means_a_step_without_the_dumps_own(tmp_path: Path) -> None:
    steps = [("schedule", 110), ("execute", 1010), ("apply", 60), ("schedule", 130), ("execute", 1030), ("apply", 80)]
    paths = write_dumps(tmp_path, [("start", 999), (NOTHING, 10), *steps])
    assert instructions(paths, 2) == {"schedule": 110.0, "execute": 1010.0, "apply": 60.0}
    with pytest.raises(ValueError, match="'apply': 2"):
        instructions(paths, 1)


def test_the_cost_is_the_difference_over_the_step_without() -> None:
    whole = dict(zip(PARTS, (130.0, 9_870.0, 60.0), strict=True))
    full = dict(zip(PARTS, (130.0, 870.0, 60.0), strict=True))
    plain = dict(zip(PARTS, (100.0, 850.0, 50.0), strict=True))
    twice = dict(zip(PARTS, (130.0, 920.0, 60.0), strict=True))
    found = cost(whole, full, plain, twice)
    assert (found.books, found.kernels, found.finding, found.step) == (40.0, 20.0, 50.0, 10_000.0)
    assert found.share == pytest.approx(0.006)
    assert found.bound == pytest.approx(0.009)


def test_the_kernels_have_what_the_variants_replace(tmp_path: Path) -> None:
    write_sources(tmp_path)
    for variant, header in PASTS.items():
        text = (tmp_path / variant / "attention_parts.h").read_text()
        assert ("masked_list_live(" in text) == ("masked_any_live(" in text) == (header is not None)
    with pytest.raises(RuntimeError, match="list_live"):
        replaced("nothing of the kind", "plain_past.h")
