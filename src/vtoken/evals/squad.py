"""Questions with answers from a file, and SQuAD's two measures of an answer.

`normalize`, `exact_match` and `f1` are those of the official script of SQuAD 1.1: case, punctuation, articles and
spaces do not count; F1 is over the bags of words; the best of the accepted answers counts.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vtoken.base.errors import ConfigError
from vtoken.base.validation import shorten
from vtoken.evals.texts import read_file

_EXPECTED: Final = 'lines such as {"context": "...", "question": "...", "answers": ["..."]}, or SQuAD\'s JSON'


@dataclass(frozen=True)
class Question:
    context: str
    question: str
    answers: tuple[str, ...]  # any of them is right; there is at least one


def read_questions(path: Path) -> list[Question]:
    """The questions of a file: JSON lines of context, question and answers (texts, or SQuAD's {"text": [...]}), or the
    JSON of SQuAD and XQuAD. Questions without an answer, as SQuAD 2.0 has them, are left out.

    Raises ConfigError, with the line where there are lines, for anything else.
    """
    content = read_file(path, "file")
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        whole = None  # more than one line, or nothing that is JSON
    if isinstance(whole, dict) and "data" in whole:
        found = list(_squad(path, whole["data"]))
    else:
        found = [_question(record, f"{path}, line {number}") for number, record in _lines(path, content)]
    found = [question for question in found if question.answers]
    if not found:
        raise ConfigError(f"file: {path} holds no question with an answer; expected {_EXPECTED}")
    return found


def _lines(path: Path, content: str) -> list[tuple[int, Any]]:
    """(number, what it says) of each line that is not blank; all are read before any is looked at."""
    found = []
    for number, line in enumerate(content.split("\n"), 1):
        try:
            if line.strip():
                found.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"file: {path}, line {number}: no JSON: {error}; expected {_EXPECTED}") from None
    return found


def _question(record: Any, where: str) -> Question:
    if not isinstance(record, dict):
        raise ConfigError(f"file: {where}: expected an object, got {shorten(record)}")
    texts = {}
    for name in ("context", "question"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise ConfigError(f"file: {where}: {name}: expected text, got {shorten(record.get(name))}")
        texts[name] = record[name]
    answers = record.get("answers")
    if isinstance(answers, dict):  # as Hugging Face's copy of SQuAD has them
        answers = answers.get("text")
    if isinstance(answers, str):
        answers = [answers]
    if isinstance(answers, list):  # SQuAD's own: [{"text": ..., "answer_start": ...}]
        answers = [answer.get("text") if isinstance(answer, dict) else answer for answer in answers]
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ConfigError(f"file: {where}: answers: expected a list of texts, got {shorten(record.get('answers'))}")
    return Question(texts["context"], texts["question"], tuple(answer for answer in answers if answer.strip()))


def _squad(path: Path, articles: Any) -> Iterator[Question]:
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for record in paragraph["qas"]:
                    yield _question({"context": paragraph["context"], **record}, f"{path}, question {record.get('id')}")
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"file: {path} begins like SQuAD's JSON, but is not; expected {_EXPECTED}") from None


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1.0 or 0.0"""
    return float(any(normalize(answer) == normalize(right) for right in accepted))


def f1(answer: str, accepted: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall of words, from 0 to 1."""
    return max(_f1(normalize(answer).split(), normalize(right).split()) for right in accepted)


def _f1(words: list[str], right: list[str]) -> float:
    common = sum((Counter(words) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(right)
    return 2 * precision * recall / (precision + recall)
