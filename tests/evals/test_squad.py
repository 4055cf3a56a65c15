"""SQuAD's measures on answers worked out by hand, and what may stand in a file of questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vtoken.base.errors import ConfigError
from vtoken.evals.squad import Question, exact_match, f1, normalize, read_questions


def test_case_punctuation_articles_and_spaces_do_not_count() -> None:
    assert normalize("  The  cat's an \n answer, a THEORY!") == "cats answer theory"
    assert exact_match("the Broncos.", ["Denver Broncos", "Broncos"]) == 1.0
    assert exact_match("Broncos of Denver", ["Denver Broncos", "Broncos"]) == 0.0


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("in Denver, Colorado", ["Denver"], 0.5),  # precision 1/3, recall 1
        ("Denver Denver", ["Denver"], 2 / 3),  # a bag: the second one is one too many
        ("nothing", ["Denver"], 0.0),
        ("", ["Denver"], 0.0),
        ("the", ["Denver"], 0.0),  # nothing is left of it
        ("gold", ["silver", "gold and white", "gold"], 1.0),  # the best of them
    ],
)
def test_f1_is_over_bags_of_words(answer: str, accepted: list[str], expected: float) -> None:
    assert f1(answer, accepted) == pytest.approx(expected)


RIGHT = Question("It was red.", "What was it?", ("red",))


@pytest.mark.parametrize(
    "answers",
    [["red"], "red", [{"text": "red", "answer_start": 7}], {"text": ["red"], "answer_start": [7]}],
    ids=["list", "text", "squad", "hugging face"],
)
def test_lines_say_their_answers_in_several_ways(tmp_path: Path, answers: Any) -> None:
    record = {"context": RIGHT.context, "question": RIGHT.question, "answers": answers}
    empty = {"context": "x", "question": "y", "answers": []}  # as SQuAD 2.0 has them
    file = tmp_path / "qa.jsonl"
    file.write_text("\n".join(["", json.dumps(record), json.dumps(empty), ""]))
    assert read_questions(file) == [RIGHT]


def test_a_single_line_is_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text(json.dumps({"context": RIGHT.context, "question": RIGHT.question, "answers": ["red"]}))
    assert read_questions(file) == [RIGHT]


def test_squads_own_file(tmp_path: Path) -> None:
    qas = [{"id": "7", "question": RIGHT.question, "answers": [{"text": "red", "answer_start": 7}]}]
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": [{"context": RIGHT.context, "qas": qas}]}]}))
    assert read_questions(file) == [RIGHT]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"context": "x", "question": "y", "answers": ["z"]}\nnonsense', "line 2: no JSON"),
        ('{"context": "x", "answers": ["z"]}\n{}', "line 1: question: expected text, got None"),
        ('{"context": 3, "question": "y", "answers": ["z"]}', "context: expected text, got 3"),
        ('{"context": "x", "question": "y", "answers": 3}', "answers: expected a list of texts, got 3"),
        ("[1]\n[2]", r"line 1: expected an object, got \[1\]"),
        ('{"data": [{"paragraphs": 3}]}', "begins like SQuAD's JSON, but is not"),
        ('{"data": 3}', "begins like SQuAD's JSON, but is not"),
        ("", "holds no question with an answer"),
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"^file: .*{message}") as error:
        read_questions(file)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file: .*qa.jsonl cannot be read: No such file"):
        read_questions(tmp_path / "qa.jsonl")
