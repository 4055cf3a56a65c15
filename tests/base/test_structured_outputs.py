"""The form of an answer: exactly one kind, checked by name; a dict will do."""

from __future__ import annotations

from typing import Any

import pytest

from vtoken import SamplingParams
from vtoken.base.errors import RequestError
from vtoken.base.logits_processors import takes_prompt
from vtoken.base.structured_outputs import StructuredOutputsParams

DEEP: dict[str, Any] = {}
for _ in range(5000):
    DEEP = {"not": DEEP}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected exactly one of json, json_object, regex, choice, grammar, got none of them"),
        ({"json_object": False}, "got none of them"),
        ({"regex": "a", "choice": ["x"]}, "got regex and choice"),
        ({"json": {}, "json_object": True}, "got json and json_object"),
        ({"json": "{"}, "json: expected a JSON schema: .* it is no JSON: "),
        ({"json": "[1]"}, "json: .* got a JSON list"),
        ({"json": 3}, "json: expected a JSON schema: a dict, or its text, got 3"),
        ({"json": {"a": object()}}, "json: .*not JSON serializable"),
        ({"json": {"a": float("nan")}}, "json: .*no JSON"),
        ({"json": DEEP}, "json: .*no JSON"),
        ({"regex": ""}, "regex: expected a regular expression"),
        ({"regex": b"a"}, "regex: expected"),
        ({"regex": "\ud800"}, "regex: "),
        ({"choice": []}, "choice: expected a list of at least one text"),
        ({"choice": ["a", ""]}, "choice: .* got '' at index 1"),
        ({"choice": "yes"}, "choice: expected"),
        ({"choice": ["\ud800"]}, "choice: "),
        ({"grammar": 5}, "grammar: expected a grammar"),
        ({"regx": "a"}, r"regx: unknown setting of structured_outputs; did you mean 'regex'\?"),
        ({1: "a"}, "1: unknown setting"),
        ({"structural_tag": "x", "regex": "a"}, "structural_tag: not there yet"),
        ({"regex": "a", "whitespace_pattern": " "}, "are for JSON, not for regex"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradict each other"),
        ("[0-9]+", "expected StructuredOutputsParams, or a dict of its fields, or None"),
    ],
)
def test_what_is_no_form_is_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs: .*{message}") as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.field == "structured_outputs"
    assert len(str(caught.value)) < 400


def test_a_dict_is_as_good_as_the_class() -> None:
    given = {"choice": ["yes", "no"]}
    params = SamplingParams(structured_outputs=given)
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(choice=("yes", "no")))
    assert params.replace(n=2).structured_outputs == params.structured_outputs
    assert params.structured_outputs is not None
    assert params.structured_outputs.form == "choice"


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"properties": {"z": {}, "a": {}, "ž": {}}}
    for given in (schema, '{"properties": {"z": {}, "a": {}, "ž": {}}}'):
        assert StructuredOutputsParams(json=given).schema_text == '{"properties": {"z": {}, "a": {}, "ž": {}}}'
    empty = StructuredOutputsParams(json={})  # any JSON
    assert (empty.form, empty.schema_text) == ("json", "{}")


@pytest.mark.parametrize("name", ["guided_decoding", "guided_json", "guided_regex", "response_format"])
def test_old_names_lead_to_the_new_one(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name}: use structured_outputs="):
        SamplingParams(**{name: {"regex": "a"}})


def test_the_signature_tells_who_wants_the_prompt() -> None:
    class Counts:
        def __call__(self, prompt: list[int], answer: list[int], row: object) -> object:
            return row

    assert not takes_prompt(lambda answer, row: row)
    assert takes_prompt(lambda prompt, answer, row: row)
    assert takes_prompt(Counts())
    assert not takes_prompt(lambda *both: both[-1])
    assert not takes_prompt(lambda answer, row, *, strength=2: row)
    assert not takes_prompt(max)  # no signature
