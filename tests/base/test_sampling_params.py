from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from vtoken import RequestError, SamplingParams
from vtoken.base.config import EngineConfig
from vtoken.base.validation import Settings


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.ignore_eos, params.stop_token_ids) == (None, 16, False, ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", bad) for bad in (-1, math.nan, math.inf, -math.inf, 1e400, "hot", True, None, 101, 10**400)],
        *[("top_p", bad) for bad in (0, 1.5, math.nan, -0.1, "1", True, None)],
        *[("top_k", bad) for bad in (-5, -2, 0.5, 1.0, "1", True, None, 2**31)],
        *[("min_p", bad) for bad in (2, -0.5, math.nan, "0", False, None)],
        *[("n", bad) for bad in (0, -1, 1.0, "2", True, None, 1025, 100_000)],
        *[("max_tokens", bad) for bad in (0, -1, 1.5, 1e12, "16", True, 2**63)],
        *[("length_penalty", bad) for bad in (-31, 31, math.nan, math.inf, "1", None)],
        *[("repetition_penalty", bad) for bad in (0, -1, 1e-300, 1e7, math.nan, "1", None)],
        *[("seed", bad) for bad in (2**70, 2**64, -(2**63) - 1, 1.0, "1", True)],
        *[("ignore_eos", bad) for bad in (1, 0, "true", None)],
        *[("stop_token_ids", bad) for bad in (5, "12", [-1], [1.0], [True], ["1"], [None], [2**31])],
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:  # U05, U68
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: expected ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "held"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 1e-9, 1e-9),
        ("temperature", 100, 100.0),
        ("top_p", 1, 1.0),
        ("top_k", -1, -1),
        ("min_p", 1, 1.0),
        ("n", 1024, 1024),
        ("max_tokens", None, None),
        ("max_tokens", 10**12, 10**12),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("stop_token_ids", [3, 1], (3, 1)),
        ("stop_token_ids", {7}, (7,)),
        ("stop_token_ids", None, ()),
    ],
)
def test_values_at_the_edge_are_held_as_documented(field: str, value: Any, held: Any) -> None:
    value_held = getattr(SamplingParams(**{field: value}), field)
    assert value_held == held
    assert type(value_held) is type(held)


def test_the_message_shows_what_was_expected_and_what_was_found() -> None:
    with pytest.raises(RequestError, match=r"^stop_token_ids: expected a sequence of token ids.* got -2 at index 1$"):
        SamplingParams(stop_token_ids=[1, -2])


def test_a_huge_value_is_cut_in_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature="x" * 10**6)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
    with pytest.raises(RequestError, match="a huge int"):
        SamplingParams(n=10**5000)


def test_several_bad_values_are_named_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_p=7, n=0)
    assert caught.value.field == "n"
    assert "n: " in str(caught.value)
    assert "; top_p: " in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"n": 4, "best_of": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"use_beam_search": True, "n": 2, "top_k": 5}, "use_beam_search"),
    ],
)
def test_a_contradiction_names_the_first_field_at_fault(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=rf"^{field}: ") as caught:
        SamplingParams(**settings)
    assert caught.value.field == field


def test_an_unknown_name_is_refused_and_the_nearest_one_offered() -> None:  # U64
    with pytest.raises(
        RequestError, match=r"^temprature: unknown sampling parameter; did you mean 'temperature'\?"
    ) as caught:
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    assert caught.value.field == "temprature"


def test_only_keywords() -> None:
    with pytest.raises(RequestError, match=r"^SamplingParams takes names only, such as temperature=0\.8; got 0\.5"):
        SamplingParams(0.5)  # type: ignore[misc]


@pytest.mark.parametrize("settings", [SamplingParams, EngineConfig])
def test_no_field_is_said_to_be_elsewhere(settings: type[Settings]) -> None:
    assert not set(settings.elsewhere) & set(settings.names())


def test_help_tells_what_each_field_means() -> None:
    text = inspect.getdoc(SamplingParams) or ""
    for name, field in SamplingParams.model_fields.items():
        assert f"{name}: {field.description} Default: {field.default!r}." in text


def test_frozen_and_replaced_with_the_same_checks() -> None:
    params = SamplingParams(seed=1, stop_token_ids=[2])
    with pytest.raises(ValueError, match="frozen"):
        params.seed = 2  # type: ignore[misc]
    assert params.replace(n=3) == SamplingParams(seed=1, stop_token_ids=[2], n=3)
    with pytest.raises(RequestError, match="^n: "):
        params.replace(n=0)


def test_stop_tokens_must_exist_in_the_vocabulary() -> None:  # U07
    params = SamplingParams(stop_token_ids=[0, 99, 100])
    params.check_vocabulary(101)
    with pytest.raises(RequestError, match=r"below the vocabulary size 100, got \[100\]") as caught:
        params.check_vocabulary(100)
    assert caught.value.field == "stop_token_ids"
