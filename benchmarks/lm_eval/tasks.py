"""Five small tasks as lm-eval's configurations over local files, so that no hub is asked.

One for each kind of request that lm-eval knows: the likeliest of some texts, a word that is forced, a running text, and
answers that are drawn. All but the last are made of the text that comes with vtoken.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vtoken.evals.squad import Question

Doc = dict[str, Any]

NUM_CHOICES: Final = 4
READ_FIRST: Final = 40  # words, at least, before a sentence whose last word is asked for
PAGE: Final = 1500  # characters, at least, of a running text


@dataclass(frozen=True)
class Task:
    name: str
    about: str  # what is asked, for the page
    config: dict[str, Any]  # lm-eval's, all but where the documents lie
    docs: list[Doc]

    def written_to(self, folder: Path) -> dict[str, Any]:
        """lm-eval's configuration, the documents in a file of the folder."""
        path = folder / f"{self.name}.jsonl"
        path.write_text("".join(json.dumps(doc) + "\n" for doc in self.docs), encoding="utf-8")
        return {
            "task": self.name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}},
            "test_split": "test",
            **self.config,
        }


def make_tasks(text: str, questions: Sequence[Question], limit: int) -> list[Task]:
    """At most `limit` documents each; without questions, the last task is left out."""
    tasks = [_next_sentence(text, limit), _last_word(text, limit), _running_text(text, limit), _repeat(text, limit)]
    return tasks + ([_answers(questions, limit)] if questions else [])


def sentences(text: str) -> list[str]:
    """The sentences of a text of at least six words, in order."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    found = [each for paragraph in paragraphs for each in re.split(r"(?<=[.!?])\s+(?=[A-Z“‘])", paragraph)]
    return [sentence for sentence in found if len(sentence.split()) >= 6]


def spread(docs: list[Doc], limit: int) -> list[Doc]:
    """At most `limit` of them, from all over the text."""
    return [docs[i * len(docs) // min(limit, len(docs))] for i in range(min(limit, len(docs)))]


def _next_sentence(text: str, limit: int) -> Task:
    draw, found = random.Random(0), sentences(text)
    docs = []
    for i in range(3, len(found), 2):
        others = draw.sample([k for k in range(len(found)) if abs(k - i) > 3], NUM_CHOICES - 1)
        order = draw.sample([i, *others], NUM_CHOICES)
        docs.append(
            {"context": " ".join(found[i - 3 : i]), "choices": [found[k] for k in order], "gold": order.index(i)}
        )
    config = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    return Task("next_sentence", "which of four sentences goes on", config, spread(docs, limit))


def _last_word(text: str, limit: int) -> Task:
    docs, found = [], sentences(text)
    for i, sentence in enumerate(found):
        start = next((k for k in range(i - 1, -1, -1) if len(" ".join(found[k:i]).split()) >= READ_FIRST), None)
        words = sentence.split()
        word = re.match(r"\w+", words[-1])
        if start is not None and word is not None:
            docs.append({"context": " ".join([*found[start:i], *words[:-1]]), "word": word.group()})
    config = {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' ' + word}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    }
    return Task("last_word", "the last word of a sentence, as LAMBADA asks it", config, spread(docs, limit))


def _running_text(text: str, limit: int) -> Task:
    pages = [""]
    for paragraph in text.split("\n\n"):
        if len(pages[-1]) >= PAGE:
            pages.append("")
        pages[-1] += f"{paragraph.strip()}\n\n"
    config = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    }
    docs = [{"page": page.strip()} for page in pages]
    return Task("running_text", "perplexity of a running text", config, spread(docs, -(-limit // 5)))


def _repeat(text: str, limit: int) -> Task:
    docs, found = [], sentences(text)
    for i in range(0, len(found) - 1, 2):
        words = f"{found[i]} {found[i + 1]}".split()
        if 20 <= len(words) <= 60:
            half = len(words) // 2
            docs.append({"whole": " ".join(words), "begun": " ".join(words[:half]), "rest": " ".join(words[half:])})
    return Task(
        "repeat",
        "a passage said again to its end",
        _drawn("{{whole}}\n\n{{begun}}", "{{rest}}", 96),
        spread(docs, limit),
    )


def _answers(questions: Sequence[Question], limit: int) -> Task:
    docs = [{"context": q.context, "question": q.question, "answer": q.answers[0]} for q in questions]
    config = _drawn("{{context}}\n\nQuestion: {{question}}\nAnswer:", "{{answer}}", 24)
    return Task("answers", "questions of XQuAD, answered", config, spread(docs, limit))


def _drawn(prompt: str, target: str, max_tokens: int) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": prompt,
        "doc_to_target": target,
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": max_tokens, "do_sample": False},
        "filter_list": [
            {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        "metric_list": [
            {"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True, "aggregation": "mean"}
            | {"higher_is_better": True}
        ],
    }
