"""What tasks ask, and how they grade what comes back: by hand, with tokens that are bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.evals.outputs import answered, scored
from vtoken.base.errors import ConfigError
from vtoken.engine.text import Tokenizer
from vtoken.evals.needle import DIGITS, Needle
from vtoken.evals.perplexity import Perplexity
from vtoken.evals.qa import MOST_TOKENS, QuestionAnswering
from vtoken.evals.squad import Question
from vtoken.evals.texts import BUILT_IN, Text, read_text

TEXT = Text("a text", "".join(chr(ord("a") + i % 26) for i in range(1000)))


# --- texts ------------------------------------------------------------------------------------------------------------


def test_the_text_that_comes_along_is_prose_of_some_length() -> None:
    text = read_text(None)
    assert text.name == BUILT_IN
    assert text.content.startswith("Letter 1")
    assert 5000 < len(text.content.split()) < 6000
    assert max(len(line) for line in text.content.splitlines()) > 200  # paragraphs, not lines of print


def test_a_text_is_a_file_of_utf8_that_is_not_empty(tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    file.write_bytes(b"\xef\xbb\xbfOnce\n")
    assert read_text(file) == Text("story.txt", "Once\n")
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="text: .* has no text in it"):
        read_text(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="text: .* is not UTF-8 text"):
        read_text(file)
    with pytest.raises(ConfigError, match="text: .* cannot be read: Is a directory"):
        read_text(tmp_path)


# --- perplexity -------------------------------------------------------------------------------------------------------


def test_windows_lie_one_behind_the_other(tokenizer: Tokenizer) -> None:
    task = Perplexity(TEXT, length=300, limit=5)
    probes = task.prepare(tokenizer)
    assert [bytes(probe.token_ids).decode() for probe in probes] == [TEXT.content[i : i + 300] for i in (0, 300, 600)]
    assert all(probe.is_scored and probe.prompt_end is None and probe.max_tokens == 1 for probe in probes)
    assert "3 windows of 300 tokens of a text" in task.about
    assert len(Perplexity(TEXT, length=300, limit=2).prepare(tokenizer)) == 2


def test_the_second_half_of_a_window_counts() -> None:
    task = Perplexity(TEXT, length=6, limit=2)
    outputs = [scored([-9.0, -9.0, -1.0, -2.0, -3.0]), scored([-9.0, -9.0, -2.0, -2.0, -2.0])]
    grade = task.grade(outputs)
    assert grade.scores["logprob"] == -2.0
    assert grade.scores["perplexity"] == pytest.approx(math.exp(2))


def test_a_text_shorter_than_a_window_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="length: a text has 1,000 tokens, fewer than a window of 1,001"):
        Perplexity(TEXT, length=1001, limit=1).prepare(tokenizer)


# --- needle -----------------------------------------------------------------------------------------------------------


def needle(**changes: object) -> Needle:
    settings = {"lengths": (200, 1500), "depths": (0.0, 0.5, 1.0), "limit": 2, "seed": 0, "is_known": False}
    return Needle(TEXT, **(settings | changes))  # type: ignore[arg-type]


def test_a_needle_lies_in_its_haystack_at_its_depth(tokenizer: Tokenizer) -> None:
    task = needle()
    probes = task.prepare(tokenizer)
    assert len(task.asked) == 12  # depths, lengths, needles
    assert len(probes) == 24
    for asked, (depth, length, _) in zip(task.asked, task.places, strict=True):
        context, question = bytes(asked.context).decode(), bytes(asked.question).decode()
        number = bytes(asked.answer).decode().strip()
        assert len(number) == DIGITS
        assert number.isdigit()
        assert len(asked.context) == length
        city = question.split("secret number of ")[1].split("?")[0]
        fact = f" The secret number of {city} is {number}."
        assert context.count(fact) == 1
        assert question.endswith(f"Answer: The secret number of {city} is")
        assert context.index(fact) == round(depth * (length - len(fact)))
        hay = context.replace(fact, "")
        assert hay in TEXT.content * 3  # a short text comes round again


def test_only_the_depth_differs_between_depths(tokenizer: Tokenizer) -> None:
    task = needle()
    task.prepare(tokenizer)
    of_place = dict(zip(task.places, task.asked, strict=True))
    for length in (200, 1500):
        for i in range(2):
            first, *others = (of_place[depth, length, i] for depth in (0.0, 0.5, 1.0))
            assert all(
                other.answer == first.answer and sorted(other.context) == sorted(first.context) for other in others
            )
    assert len({tuple(asked.answer) for asked in task.asked}) == 4  # one for each length and needle


def test_the_seed_draws_the_needles(tokenizer: Tokenizer) -> None:
    first, again, other = needle(), needle(), needle(seed=1)
    assert first.prepare(tokenizer) == again.prepare(tokenizer) != other.prepare(tokenizer)


def test_tokens_die_before_the_question_or_after_it(tokenizer: Tokenizer) -> None:
    task, known = needle(), needle(is_known=True)
    asked_after, asked_before = task.prepare(tokenizer), known.prepare(tokenizer)
    assert [probe.token_ids for probe in asked_after] == [probe.token_ids for probe in asked_before]
    assert [probe.prompt_end for probe in asked_after[:2]] == [200, 200]
    assert [probe.prompt_end for probe in asked_before[:2]] == [len(asked_before[0].token_ids)] * 2
    assert asked_after[1].token_ids == asked_after[0].token_ids + task.asked[0].answer
    assert "before the question" in task.about
    assert "after the question" in known.about


def test_needles_are_graded_by_cell(tokenizer: Tokenizer) -> None:
    task = needle(lengths=(200,), depths=(0.0, 1.0))
    task.prepare(tokenizer)
    outputs = []
    for i, asked in enumerate(task.asked):
        number = bytes(asked.answer).decode()
        before = [-9.0] * (len(asked.context) + len(asked.question) - 1)
        outputs += [answered(f"{number}. So it is" if i < 3 else "0"), scored(before + [-1.0 - i] * len(asked.answer))]
    grade = task.grade(outputs)
    assert [(cell.depth, cell.length, cell.found, cell.tried, cell.logprob) for cell in grade.cells] == [
        (0.0, 200, 2, 2, -1.5),
        (1.0, 200, 1, 2, -3.5),
    ]
    assert grade.scores == {"found": 0.75, "logprob": -2.5}


def test_a_haystack_needs_room_for_its_needle(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="length: a haystack of 60 tokens has no room for a needle of .*at least"):
        needle(lengths=(60,)).prepare(tokenizer)


# --- questions --------------------------------------------------------------------------------------------------------

QUESTIONS = [
    Question(f"It was {color}.", "What was it?", (color, f"all {color}")) for color in ("red", "blue", "green")
]


def qa(limit: int = 3, seed: int = 0, is_known: bool = False) -> QuestionAnswering:
    return QuestionAnswering("a file", QUESTIONS, limit, seed, is_known)


def test_a_question_is_asked_behind_its_paragraph(tokenizer: Tokenizer) -> None:
    probes = qa().prepare(tokenizer)
    assert bytes(probes[0].token_ids).decode() == "It was red.\n\nQuestion: What was it?\nAnswer:"
    assert (probes[0].prompt_end, probes[0].max_tokens, probes[0].is_scored) == (len("It was red."), MOST_TOKENS, False)
    assert probes[0].stop_token_ids == (ord("\n"),)
    assert bytes(probes[1].token_ids).decode().endswith("Answer: red")
    assert probes[1].is_scored


def test_some_questions_are_drawn_by_the_seed(tokenizer: Tokenizer) -> None:
    drawn = [qa(1, seed) for seed in range(20)]
    texts = [tuple(task.prepare(tokenizer)[0].token_ids) for task in drawn]
    assert len(set(texts)) == 3
    assert "1 of 3 questions of a file" in drawn[0].about


def test_answers_are_graded_by_their_first_line(tokenizer: Tokenizer) -> None:
    task = qa()
    task.prepare(tokenizer)
    outputs = []
    for asked, text in zip(task.asked, ("\n the RED\nand so on", "all of it blue", ""), strict=True):
        before = [-9.0] * (len(asked.context) + len(asked.question) - 1)
        outputs += [answered(text), scored(before + [-0.5] * len(asked.answer))]
    grade = task.grade(outputs)
    assert grade.scores["exact_match"] == pytest.approx(1 / 3)
    assert grade.scores["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)  # "all blue": precision 2/4, recall 1
    assert grade.scores["logprob"] == pytest.approx(-0.5)
