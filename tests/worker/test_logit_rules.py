"""Rules on logits against a plain reference, token by token, and against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from vtoken.base.sampling_params import SamplingParams
from vtoken.schedule.logit_rules import order_rules, rules_of
from vtoken.schedule.sequence import Request, Sequence
from vtoken.worker.logit_rules import apply_rules

VOCAB = 24
EOS = (2,)
tokens = st.integers(0, VOCAB - 1)


def sequence(prompt: list[int], answer: list[int], **params: object) -> Sequence:
    request = Request("r", prompt, SamplingParams(**params), 0, 0, 0.0, 16)
    request.rules = rules_of(request.params, prompt, EOS)
    leader = request.leader
    leader.token_ids = prompt + answer
    return leader


def changed(draws: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    rules = order_rules(draws)
    if rules is not None:
        apply_rules(logits, rules)
    return logits


def plain(prompt: list[int], answer: list[int], params: SamplingParams, logits: list[float]) -> list[float]:
    out = []
    for token, logit in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logit = -math.inf
        logit += (params.logit_bias or {}).get(token, 0.0)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
        if len(answer) < params.min_tokens and token in ends:
            logit = -math.inf
        if token in prompt or token in answer:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * answer.count(token) + params.presence_penalty * (token in answer)
        out.append(logit)
    return out


settings = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.25, 4),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=5),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=8),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(tokens, max_size=3),
        "ignore_eos": st.booleans(),
    },
)
texts = st.lists(tokens, min_size=1, max_size=20)


@given(st.lists(st.tuples(texts, texts, settings), min_size=1, max_size=5), st.integers(0, 2**32))
def test_every_row_is_what_plain_arithmetic_says(rows: list[tuple[list[int], list[int], dict]], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    found = changed([sequence(prompt, answer, **params) for prompt, answer, params in rows], logits)
    for row, (prompt, answer, params) in enumerate(rows):
        expected = plain(prompt, answer, SamplingParams(**params), logits[row].tolist())
        np.testing.assert_allclose(found[row].numpy(), np.array(expected), rtol=2e-5, atol=2e-5)


def test_the_repetition_penalty_is_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    text = [3, 9, 9, 4, 3, 7]
    found = changed([sequence(text[:3], text[3:], repetition_penalty=1.7)], logits)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([text]), logits.clone())
    torch.testing.assert_close(found, expected)


def test_rows_without_rules_keep_their_bits() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 5] = torch.nan
    draws = [sequence([1], []), sequence([1, 2], [3], repetition_penalty=2.0), sequence([4], [5], temperature=0.0)]
    found = changed(draws, logits)
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert order_rules([draws[0], draws[2]]) is None


def test_counts_follow_an_answer_that_grows() -> None:
    leader = sequence([1, 2], [], frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    for step in range(6):
        found = changed([leader], logits)
        assert found[0, 7].item() == -step
        leader.token_ids.append(7)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
def test_bad_values_are_refused_by_name(params: dict, field: str) -> None:
    from vtoken.base.errors import RequestError

    with pytest.raises(RequestError, match=f"^{field}") as error:
        SamplingParams(**params)
    assert error.value.field == field
