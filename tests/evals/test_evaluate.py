"""Evaluations of a tiny model, held to plain computations of the same thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.dense import dense_causal
from vtoken import LLM, EngineError
from vtoken.base.errors import ConfigError
from vtoken.evals import evaluate as module
from vtoken.evals.evaluate import Evaluation, evaluate, run_probes
from vtoken.evals.needle import Needle
from vtoken.evals.perplexity import Perplexity
from vtoken.evals.setting import Grid, Setting, make_grid
from vtoken.evals.task import Probe, Task
from vtoken.evals.texts import read_text
from vtoken.models.kernels import BATCH_INVARIANT
from vtoken.models.loader import load_model

SMALL: dict[str, Any] = {"num_blocks": 400, "attention_backend": "reference"}
BLOCK = 16 * 2 * 2 * 16 * 4 * 2  # bytes: tokens, layers, KV heads, their width, float32, keys and values


@dataclass
class Progress:
    """Keeps what it is told."""

    total: int = 0
    seen: list[str] = field(default_factory=list)

    def begin(self, total: int) -> Callable[[Setting], None]:
        self.total = total
        return lambda setting: self.seen.append(str(setting))


def perplexity(folder: Path, grid: Grid, progress: Progress | None = None, **engine: Any) -> Evaluation:
    task = Perplexity(read_text(None), length=256, limit=2)
    return evaluate(str(folder), task, grid, SMALL | engine, (progress or Progress()).begin)


def test_the_perplexity_of_the_full_cache_is_that_of_transformers(folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = tokenizer.encode(read_text(None).content)
    scores = []
    for begin in (0, 256):
        text = torch.tensor([token_ids[begin : begin + 256]])
        with torch.inference_mode():
            logprobs = model(text).logits[0].double().log_softmax(dim=1)
        scores += logprobs[127:-1].gather(1, text[0, 128:, None])[:, 0].tolist()
    found = perplexity(folder, make_grid([], [], ["auto"])).full
    assert found.grade.scores["perplexity"] == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-5)
    assert (found.retained_bytes, found.peak_bytes, found.kept) == (16 * BLOCK, 16 * BLOCK, 1.0)


def test_d08_memory_and_quality_of_budgets_and_formats_on_the_same_texts(folder: Path) -> None:
    progress = Progress()
    grid = make_grid(["streaming_llm", "knorm"], [64, 0.25], ["auto", "int8"], least_prefill_stride=32)
    found = perplexity(folder, grid, progress)
    of_setting = {str(outcome.setting): outcome for outcome in found.outcomes}
    assert progress.total == len(progress.seen) == 2 * len(grid.settings)
    assert progress.seen[::2] == [str(setting) for setting in grid.settings]
    for name in ("streaming_llm 64", "knorm 64"):
        exact, small = of_setting[name], of_setting[f"{name}, int8"]
        # A window of 256 in (64 + 32) / 16 blocks; a block more is allowed for what cannot be packed.
        assert 6 * BLOCK <= exact.peak_bytes <= 7 * BLOCK
        assert exact.kept == pytest.approx(65 / 257)  # the token that is drawn in the end is no token that died
        assert small.retained_bytes == pytest.approx((exact.retained_bytes or 0) * (16 + 4) / 64)  # a scale a head
        assert small.grade.scores["perplexity"] == pytest.approx(exact.grade.scores["perplexity"], rel=0.02)
        assert exact.grade.scores["perplexity"] != found.full.grade.scores["perplexity"]
    assert found.full is of_setting["full cache"]


def test_what_is_asked_is_asked_of_what_is_left(folder: Path) -> None:
    """The score of a needle's answer is that of dense attention which, from the question on, does not see the dead."""
    task = Needle(read_text(None), (150,), (0.5,), limit=1, seed=0, is_known=False)
    grid = make_grid(["h2o"], [48], ["auto"], prefill_stride=0)
    found = evaluate(str(folder), task, grid, SMALL, Progress().begin)
    [asked] = task.asked
    text = torch.tensor(asked.context + asked.question + asked.answer)
    begin = len(asked.context) + len(asked.question)
    with LLM(str(folder), **SMALL) as llm:
        probe = Probe(text.tolist(), prompt_end=150, is_scored=True)
        [output] = run_probes(llm, [probe], grid.settings[1].params)
    deaths = {p: died for p, died in output.outputs[0].died_at.items() if died < len(text)}
    assert min(deaths.values()) == 150
    assert sum(died == 150 for died in deaths.values()) == 150 - 48
    model = load_model(folder, "float32", BATCH_INVARIANT)
    for outcome, died_at in zip(found.outcomes, ({}, deaths), strict=True):
        with torch.inference_mode():
            hidden = model.hidden_states(text, torch.arange(len(text)), dense_causal(model, len(text), died_at))
            logprobs = model.logits(hidden).double().log_softmax(dim=1)[begin - 1 : -1]
        expected = logprobs.gather(1, text[begin:, None]).mean()
        assert outcome.grade.scores["logprob"] == pytest.approx(float(expected), abs=1e-4)
    assert found.outcomes[0].grade.scores["logprob"] != found.outcomes[1].grade.scores["logprob"]


def test_memory_of_answers_is_that_of_the_tokens_that_are_drawn(folder: Path) -> None:
    task = Needle(read_text(None), (150,), (0.5,), limit=1, seed=0, is_known=False)
    grid = make_grid(["h2o"], [48], ["auto"], prefill_stride=0, stride=16)
    full, evicted = evaluate(str(folder), task, grid, SMALL, Progress().begin).outcomes
    prompt = len(task.asked[0].context) + len(task.asked[0].question)
    last = prompt + len(task.asked[0].answer) + 4
    assert full.retained_bytes is not None
    assert evicted.retained_bytes is not None
    assert -(-prompt // 16) * BLOCK <= full.retained_bytes <= -(-last // 16) * BLOCK
    assert 3 * BLOCK <= evicted.retained_bytes <= 5 * BLOCK  # 48 to 64 tokens
    assert evicted.peak_bytes >= 10 * BLOCK  # the context was read whole


@pytest.mark.parametrize(
    ("policies", "budgets", "strides", "message"),
    [
        (["streaming_llm"], [4], {}, "streaming_llm 4: kv_budget=4 is too small for streaming_llm"),
        (["snapkv:window=64"], [128], {"prefill_stride": 16}, "kv_prefill_stride: snapkv looks at the last 64 queries"),
        (["snapkv:window=64"], [0.2], {}, "snapkv:window=64 0.2: kv_budget=52 is too small"),
    ],
)
def test_budgets_that_cannot_work_are_refused_before_the_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, policies: Any, budgets: Any, strides: Any, message: str
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(module, "LLM", never)
    with pytest.raises(ConfigError, match=message):
        perplexity(folder, make_grid(policies, budgets, ["auto"], **strides))


def test_texts_are_cut_before_the_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "LLM")
    task: Task = Perplexity(read_text(None), length=10**6, limit=1)
    with pytest.raises(ConfigError, match="fewer than a window of 1,000,000"):
        evaluate(str(folder), task, make_grid([], [], ["auto"]), SMALL, Progress().begin)


def test_a_text_that_fails_is_an_error_and_not_a_figure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no luck")

    with LLM(str(folder), **SMALL) as llm:
        monkeypatch.setattr(llm.engine.executor, "execute", broken)
        with pytest.raises(EngineError, match="text 0 of 1 failed: RuntimeError: no luck"):
            run_probes(llm, [Probe([1, 2, 3])], {})
