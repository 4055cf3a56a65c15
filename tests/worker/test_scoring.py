"""Scores of known tokens, row by row, against the logarithm of the softmax written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.plans import Lane, Slice, make_plan
from tests.worker.fake_model import FakeModel
from vtoken.attention.reference import ReferenceAttention
from vtoken.planner.kv_memory import KVShape
from vtoken.schedule.plan import NO_SCORES, NOTHING_TO_SCORE, ScoringBatch
from vtoken.worker.kv_store import KVStore
from vtoken.worker.runner import ModelRunner
from vtoken.worker.scoring import MOST_ROWS, score


def identity(hidden: Tensor) -> Tensor:
    return hidden.float()


def batch(after: list[int], targets: list[int]) -> ScoringBatch:
    return ScoringBatch(np.array(after, np.int32), np.array(targets, np.int32))


def test_a_score_is_the_logarithm_of_the_probability() -> None:
    found = score(identity, torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]), batch([0, 0, 1], [2, 0, 1])).logprobs
    weights = np.exp([1.0, 2.0, 3.0])
    np.testing.assert_allclose(found, np.log([weights[2] / weights.sum(), weights[0] / weights.sum(), 1 / 3]))


def test_where_nobody_asks_nothing_is_done() -> None:
    assert score(lambda hidden: pytest.fail("logits were made"), torch.zeros(3, 2), NOTHING_TO_SCORE) is NO_SCORES


def test_it_is_exact_where_float32_would_lose_it() -> None:
    [found] = score(identity, torch.tensor([[20.0, 0.0]]), batch([0], [0])).logprobs
    np.testing.assert_allclose(found, -np.exp(-20.0), rtol=1e-6)


def test_rows_are_taken_in_pieces_that_change_nothing() -> None:
    hidden = torch.randn(3 * MOST_ROWS, 50, generator=torch.Generator().manual_seed(0))
    rows: list[int] = []

    def counted(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return hidden

    after = list(range(1, 3 * MOST_ROWS))
    targets = [7 * i % 50 for i in after]
    together = score(counted, hidden, batch(after, targets)).logprobs
    assert rows == [MOST_ROWS, MOST_ROWS, MOST_ROWS - 1]
    alone = [score(identity, hidden, batch([i], [t])).logprobs[0] for i, t in zip(after, targets, strict=True)]
    assert together.tolist() == alone


def test_a_large_vocabulary_takes_fewer_rows_at_once() -> None:
    rows: list[int] = []

    def wide(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return torch.zeros(len(hidden), 2**18)

    found = score(wide, torch.zeros(100, 4), batch(list(range(100)), [0] * 100)).logprobs
    assert max(rows[1:]) == 16
    assert sum(rows) == 100
    np.testing.assert_allclose(found, -18 * np.log(2.0))


def test_what_is_ruled_out_has_no_chance_and_nan_has_no_number() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [0.0, torch.nan], [0.0, torch.inf]])
    found = score(identity, logits, batch([0, 0, 1, 2], [0, 1, 0, 0])).logprobs
    assert found[:2].tolist() == [0.0, -np.inf]
    assert np.isnan(found[2])
    assert not found[3] > -np.inf  # NaN or -infinity, whatever the softmax makes of infinity


def test_a_plan_that_scores_nothing_costs_nothing() -> None:
    model = FakeModel()
    spec = model.spec
    store = KVStore(KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, "float32"), 4, 8)
    plan = make_plan([Slice(Lane(8, [1]), [3, 4, 5])])
    assert plan.scoring is NOTHING_TO_SCORE
    output = ModelRunner(model, store, ReferenceAttention()).run(plan)
    assert model.logit_rows == [1]  # of the draw
    assert len(output.scores) == 0
