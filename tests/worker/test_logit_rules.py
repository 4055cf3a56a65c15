"""Rules on logits against a plain reference, token by token, and against transformers."""

from __future__ import annotations

import asyncio
import math
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from vtoken.base.sampling_params import SamplingParams
from vtoken.schedule.logit_rules import order_rules, rules_of
from vtoken.schedule.plan import LogitRules, TokenMasks
from vtoken.schedule.sequence import Request, Sequence
from vtoken.schedule.text_rules import TextRules
from vtoken.worker.logit_rules import apply_rules

VOCAB = 24
EOS = (2,)
tokens = st.integers(0, VOCAB - 1)


Words = list[tuple[int, ...]]


def sequence(prompt: list[int], answer: list[int], words: Words = [], **params: object) -> Sequence:  # noqa: B006
    request = Request("r", prompt, SamplingParams(**params), 0, 0, 0.0, 16)
    request.rules = rules_of(request.params, prompt, EOS, TextRules(bad_words=tuple(words)))
    leader = request.leader
    leader.token_ids = prompt + answer
    return leader


def changed(draws: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    rules = order_rules(draws)
    if rules is not None:
        apply_rules(logits, rules)
    return logits


def plain(
    prompt: list[int], answer: list[int], words: Words, params: SamplingParams, logits: list[float]
) -> list[float]:
    out = []
    for token, logit in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logit = -math.inf
        logit += (params.logit_bias or {}).get(token, 0.0)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
        if len(answer) < params.min_tokens and token in ends:
            logit = -math.inf
        if any((*answer, token)[-len(word) :] == word for word in words):
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
# Of few tokens, so that they do come up.
few = st.lists(st.integers(0, 3), min_size=1, max_size=20)
bad_words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6)


@given(
    st.lists(st.tuples(texts | few, texts | few, bad_words, settings), min_size=1, max_size=5), st.integers(0, 2**32)
)
def test_every_row_is_what_plain_arithmetic_says(
    rows: list[tuple[list[int], list[int], Words, dict]], seed: int
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    found = changed([sequence(prompt, answer, words, **params) for prompt, answer, words, params in rows], logits)
    for row, (prompt, answer, words, params) in enumerate(rows):
        expected = plain(prompt, answer, words, SamplingParams(**params), logits[row].tolist())
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


def only_masks(rows: list[int], words: np.ndarray) -> LogitRules:
    no_ids, no_values = np.zeros(0, np.int64), np.zeros(0, np.float32)
    masks = TokenMasks(np.array(rows, np.int64), words)
    return LogitRules(no_ids, no_ids, no_values, (), no_ids, no_ids, no_values, no_values, masks)


@given(
    width=st.integers(1, 200),
    num_words=st.integers(1, 8),
    rows=st.lists(st.integers(0, 3), unique=True, max_size=4).map(sorted),
    kinds=st.sampled_from(["random", "sparse", "dense"]),
    compiled=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_masks_leave_the_tokens_whose_bits_are_set(
    width: int, num_words: int, rows: list[int], kinds: str, compiled: bool, seed: int
) -> None:
    """Bit by bit, whatever the two widths: tokens beyond the words have no bit, bits beyond the logits no token."""
    random = np.random.default_rng(seed)
    words = random.integers(0, 2**32, (len(rows), num_words), dtype=np.uint32)
    if kinds != "random":
        words &= random.integers(0, 2**32, words.shape, dtype=np.uint32) * (random.random(words.shape) < 0.3)
        words = ~words if kinds == "dense" else words
    logits = torch.from_numpy(random.standard_normal((4, width)).astype(np.float32))
    logits[:, 0] = torch.nan  # what is let through keeps its bits
    found = logits.clone()
    apply_rules(found, only_masks(rows, words), compiled=compiled)
    for row in range(4):
        for token in range(width):
            is_kept = row not in rows or (
                token // 32 < num_words and int(words[rows.index(row), token // 32]) >> token % 32 & 1
            )
            expected = logits[row, token].item() if is_kept else -math.inf
            assert found[row, token].item() == pytest.approx(expected, nan_ok=True, abs=0)


def test_functions_see_their_own_row_and_text_one_after_the_other() -> None:
    seen: list[tuple[object, ...]] = []

    def first(answer: list[int], row: torch.Tensor) -> torch.Tensor:
        seen.append((list(answer), row.clone()))
        answer.append(99)  # its own copy
        return row + 1

    def second(prompt: list[int], answer: list[int], row: torch.Tensor) -> torch.Tensor:
        seen.append((list(prompt), list(answer), row.clone()))
        row[3] = -math.inf
        return row.double()

    leader = sequence([1, 2], [5], logits_processors=[first, second], logit_bias={7: 2.0})
    logits = torch.randn(2, VOCAB)
    found = changed([sequence([4], []), leader], logits)
    biased = logits[1].clone()
    biased[7] += 2
    assert torch.equal(found[0], logits[0])
    assert seen[0][0] == [5]
    torch.testing.assert_close(seen[0][1], biased, rtol=0, atol=0)
    assert seen[1][:2] == ([1, 2], [5])
    expected = biased + 1
    expected[3] = -math.inf
    torch.testing.assert_close(found[1], expected, rtol=0, atol=0)
    assert leader.token_ids == [1, 2, 5]


def leave(answer: list[int], row: torch.Tensor) -> torch.Tensor:
    sys.exit(3)


def be_cancelled(answer: list[int], row: torch.Tensor) -> torch.Tensor:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (leave, r"function 0 \(leave\) raised SystemExit: 3"),
        (be_cancelled, r"function 0 \(be_cancelled\) raised CancelledError"),
        (lambda answer, row: row.to_sparse(), r"it returned a sparse one of shape \(24,\)"),
        (lambda answer, row: row.to("meta"), r"it returned a meta tensor of shape \(24,\)"),
        (lambda answer, row: 1 / 0, r"function 0 \(<lambda>\) raised ZeroDivisionError: division by zero"),
        (lambda answer, row: None, "a float tensor of shape .24,.; it returned NoneType"),
        (lambda answer, row: row[:5], "it returned one of shape .5,."),
        (lambda answer, row: row.long(), "and torch.int64"),
        (lambda answer, row: row * math.nan, "NaN or infinite"),
        (lambda answer, row: row + math.inf, "NaN or infinite"),
        (lambda answer, row: row.numpy(), "it returned ndarray"),
    ],
)
def test_a_function_that_fails_harms_nobody_else(function: object, reason: str) -> None:
    draws = [
        sequence([1], []),
        sequence([1], [2], logits_processors=[function]),
        sequence([1], [], logit_bias={1: 1.0}),
    ]
    rules = order_rules(draws)
    assert rules is not None
    logits = torch.randn(3, VOCAB)
    found = logits.clone()
    errors = apply_rules(found, rules)
    assert list(errors) == [1]
    assert errors[1].startswith("logits_processors: ")
    assert re.search(reason, errors[1])
    assert torch.equal(found[0], logits[0])
    assert found[1].isnan().all()
    assert found[2, 1] == logits[2, 1] + 1


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
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [3]}, "bad_words"),
        ({"logits_processors": [3]}, "logits_processors"),
        ({"logits_processors": [lambda row: row]}, "logits_processors"),
        ({"logits_processors": [lambda a, b, c, d: d]}, "logits_processors"),
    ],
)
def test_bad_values_are_refused_by_name(params: dict, field: str) -> None:
    from vtoken.base.errors import RequestError

    with pytest.raises(RequestError, match=f"^{field}") as error:
        SamplingParams(**params)
    assert error.value.field == field
