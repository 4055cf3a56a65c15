"""V6: the runtime is no policy. The victims are the same in every mode, and they are not just the oldest tokens.

The model is planted: some tokens draw attention on purpose, wherever they stand. So policies that look at attention
keep scattered tokens, and a runtime that meddled would show.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.recorded import Demand, Recording, record
from tests.tiny_models import HEAVY, VOCAB_SIZE, save_planted_llama

BUDGET, STRIDE, PREFILL_STRIDE = 32, 8, 40
POLICIES = ["h2o:recent=8", "scissorhands:window=8,recent=8", "tova:recent=8", "snapkv:window=8,kernel=1"]
MODES = ["naive", "repack", "vtoken"]
KV: dict[str, Any] = {
    "kv_budget": BUDGET,
    "kv_trigger": "always",
    "kv_stride": STRIDE,
    "kv_prefill_stride": PREFILL_STRIDE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_planted_llama(tmp_path_factory.mktemp("v6"))


def demands() -> list[Demand]:
    """Texts in which one token in eight is heavy."""
    random = np.random.default_rng(3)
    prompts = []
    for length in (90, 131, 200):
        prompt = random.integers(max(HEAVY) + 1, VOCAB_SIZE, length)
        heavy = random.random(length) < 1 / 8
        prompt[heavy] = random.choice(HEAVY, heavy.sum())
        prompts.append(prompt.tolist())
    return [Demand(prompt, seed=i, params={"max_tokens": 40, "temperature": 0.0}) for i, prompt in enumerate(prompts)]


def trace_hash(run: Recording) -> str:
    """Of who died when, in all answers."""
    trace = [sorted(deaths.items()) for choices in run.died_at for deaths in choices]
    return blake2b(repr(trace).encode(), digest_size=16).hexdigest()


def play(folder: Path, policy: str, mode: str, backend: str) -> Recording:
    # Naive and repack use no dead cell again, so they need room for whole texts.
    return record(folder, demands(), num_blocks=120, block_size=8, attention_backend=backend, kv_policy=policy,
                  kv_mode=mode, max_num_batched_tokens=64, max_num_seqs=8, **KV)  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("policy", POLICIES)
def test_v06_the_arms_have_the_same_victims(folder: Path, policy: str, backend: str) -> None:
    runs = {mode: play(folder, policy, mode, backend) for mode in MODES}
    assert len({trace_hash(run) for run in runs.values()}) == 1
    assert len({str(run.tokens) for run in runs.values()}) == 1
    vtoken, naive = runs["vtoken"].stats, runs["naive"].stats
    assert vtoken.scheduler.peak_held_blocks < naive.scheduler.peak_held_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_v06_victims_are_not_just_those_that_leave_the_recent_window(folder: Path, policy: str) -> None:
    run = play(folder, policy, "vtoken", "reference")
    scattered = total = kept_heavy = heavy = 0
    for demand, [deaths] in zip(demands(), run.died_at, strict=True):
        for length in sorted(set(deaths.values())):
            victims = {position for position, died in deaths.items() if died == length}
            unprotected = [p for p in range(length - 8) if deaths.get(p, length) >= length]
            # Who left a window that moves on with the text, as under StreamingLLM.
            scattered += len(victims - set(unprotected[: len(victims)]))
            total += len(victims)
        is_heavy = np.isin(demand.prompt, HEAVY)
        heavy += int(is_heavy.sum())
        kept_heavy += sum(1 for position in np.flatnonzero(is_heavy).tolist() if position not in deaths)
    assert scattered >= 0.3 * total, f"only {scattered} of {total} victims did not simply leave a window"
    survivors = BUDGET * len(run.died_at)
    assert kept_heavy / survivors > 2 * heavy / sum(len(demand.prompt) for demand in demands()), "attention was ignored"
