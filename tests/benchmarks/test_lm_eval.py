"""lm-eval over vtoken: what the adapter says is what a plain forward pass says, and what is compared is the same.

lm-eval itself is not installed here; its base class, and how it cuts long texts, are only run by the benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.lm_eval.__main__ import arms_of, parse
from benchmarks.lm_eval.report import TRANSFORMERS, VTOKEN, Agreement, page
from benchmarks.lm_eval.scoring import generate, score
from benchmarks.lm_eval.tasks import NUM_CHOICES, READ_FIRST, Task, make_tasks, sentences
from benchmarks.pages import write_between_markers
from tests.tiny_models import BOS, EOS, save_llama
from vtoken import LLM
from vtoken.base.errors import RequestError
from vtoken.evals.squad import Question
from vtoken.evals.texts import read_text

GREEDY = {"until": [], "max_gen_toks": 12, "temperature": 0.0, "do_sample": False}
TEXT = list(read_text(None).content.encode()[:400])  # as the tiny tokenizer reads it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tokenizer=True, bos_token_id=BOS, eos_token_id=EOS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_blocks=200, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def transformer(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def logprobs_of(transformer: Any, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] of what comes after each token."""
    logprobs: torch.Tensor = transformer(torch.tensor([token_ids])).logits[0].double().log_softmax(dim=1)
    return logprobs


def likeliest(transformer: Any, token_ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        token_ids = [*token_ids, int(logprobs_of(transformer, token_ids)[-1].argmax())]
    return token_ids[-count:]


# --- what the model is asked -----------------------------------------------------------------------------------------


def test_scores_are_those_of_a_plain_forward_pass(llm: LLM, transformer: Any) -> None:
    greedy = likeliest(transformer, TEXT[:20], 5)
    wrong_at_the_end = [*greedy[:-1], (greedy[-1] + 1) % 256]
    pairs = [
        (TEXT[:40], TEXT[40:60]),
        (TEXT[:40], TEXT[40:41]),  # a context that is in the cache by then
        ([BOS], TEXT[:30]),
        (TEXT[:20], greedy),
        (TEXT[:20], wrong_at_the_end),
    ]
    found = score(llm, pairs, 254)
    for (context, scored), (logprob, is_greedy) in zip(pairs, found, strict=True):
        rows = logprobs_of(transformer, context + scored)[len(context) - 1 : -1]
        tokens = torch.tensor(scored)
        assert logprob == pytest.approx(float(rows.gather(1, tokens[:, None]).sum()), abs=1e-3)
        assert is_greedy == bool((rows.argmax(dim=1) == tokens).all())
    assert [is_greedy for _, is_greedy in found[-2:]] == [True, False]


def test_of_a_long_text_the_beginning_is_not_read(llm: LLM, transformer: Any) -> None:
    [(cut, _), (whole, _)] = score(llm, [(TEXT[:300], TEXT[300:310]), (TEXT[45:300], TEXT[300:310])], 254)
    assert cut == whole
    rows = logprobs_of(transformer, TEXT[55:310])[-11:-1]
    assert cut == pytest.approx(float(rows.gather(1, torch.tensor(TEXT[300:310])[:, None]).sum()), abs=1e-3)
    [(most, _)] = score(llm, [(TEXT[:1], TEXT[1:255])], 254)  # as much as fits
    assert most < 0


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [2] * 255)], ids=["no context", "nothing", "too much"])
def test_what_cannot_be_scored_is_refused(llm: LLM, pair: tuple[list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match="expected a context and 1 to 254 tokens to score"):
        score(llm, [pair], 254)


def test_nothing_is_asked_of_nobody(llm: LLM) -> None:
    assert score(llm, [], 254) == []
    assert generate(llm, [], [], 256) == []


def test_texts_are_drawn_until_a_text_comes(llm: LLM, transformer: Any) -> None:
    drawn = likeliest(transformer, TEXT[:50], 12)
    [whole] = generate(llm, [TEXT[:50]], [GREEDY], 256)
    assert whole == llm.get_tokenizer().decode(drawn)
    stop = whole[4:6]
    assert generate(llm, [TEXT[:50]], [GREEDY | {"until": [stop, ""]}], 256) == [whole[: whole.index(stop)]]


def test_a_long_context_loses_its_beginning(llm: LLM) -> None:
    long, short = generate(llm, [TEXT, TEXT[-244:]], [GREEDY] * 2, 256)
    assert long == short
    with pytest.raises(ValueError, match="300 tokens leave no room"):
        generate(llm, [TEXT], [GREEDY | {"max_gen_toks": 300}], 256)


def test_a_setting_that_is_none_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="num_beams"):
        generate(llm, [TEXT[:9]], [GREEDY | {"num_beams": 4}], 256)


def test_tokens_that_die_change_what_is_found(folder: Path, llm: LLM) -> None:
    """Settings of the engine are enough to measure a policy."""
    pairs = [(TEXT[:100], TEXT[100:140])]
    retention: dict[str, Any] = {"kv_policy": "streaming_llm", "kv_budget": 32, "kv_trigger": "always"}
    with LLM(str(folder), num_blocks=200, max_model_len=256, kv_prefill_stride=16, **retention) as cut:
        [(evicted, _)] = score(cut, pairs, 254)
    [(full, _)] = score(llm, pairs, 254)
    assert abs(evicted - full) > 1e-3


# --- tasks -----------------------------------------------------------------------------------------------------------

QUESTION = Question("Ada wrote it.", "Who wrote it?", ("Ada", "Ada herself"))


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return make_tasks(read_text(None).content, [QUESTION], 40)


def test_there_is_a_task_of_each_kind(tasks: list[Task]) -> None:
    kinds = {task.name: (task.config["output_type"], len(task.docs)) for task in tasks}
    assert kinds == {
        "next_sentence": ("multiple_choice", 40),
        "last_word": ("loglikelihood", 40),
        "running_text": ("loglikelihood_rolling", 8),
        "repeat": ("generate_until", 40),
        "answers": ("generate_until", 1),
    }
    assert [task.name for task in make_tasks(read_text(None).content, [], 40)] == list(kinds)[:-1]


def test_documents_are_of_the_text(tasks: list[Task]) -> None:
    text = " ".join(read_text(None).content.split())
    following = {sentence: i for i, sentence in enumerate(sentences(read_text(None).content))}
    next_sentence, last_word, running, repeat, answers = (task.docs for task in tasks)
    for doc in next_sentence:
        right = doc["choices"][doc["gold"]]
        assert len(set(doc["choices"])) == NUM_CHOICES
        assert doc["context"].endswith(list(following)[following[right] - 1])
    assert len({doc["gold"] for doc in next_sentence}) == NUM_CHOICES, "the right one is not always in one place"
    for doc in last_word:
        assert len(doc["context"].split()) >= READ_FIRST
        assert f"{doc['context'].split()[-1]} {doc['word']}" in text
    assert all(" ".join(doc["page"].split()) in text for doc in running)
    assert all(f"{doc['begun']} {doc['rest']}" == doc["whole"] for doc in repeat)
    assert answers == [{"context": "Ada wrote it.", "question": "Who wrote it?", "answer": "Ada"}]


def test_a_task_is_written_where_its_configuration_says(tasks: list[Task], tmp_path: Path) -> None:
    for task in tasks:
        config = task.written_to(tmp_path)
        assert config["task"] == task.name
        path = Path(config["dataset_kwargs"]["data_files"][config["test_split"]])
        assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == task.docs


# --- arms and page ---------------------------------------------------------------------------------------------------


def test_both_sides_read_as_much_of_a_text() -> None:
    arms = arms_of(parse(["--policy", "h2o", "--budget", "32"]), Path("model"))
    assert list(arms) == [TRANSFORMERS, VTOKEN, "vtoken, h2o 32"]
    assert {arm["model"] for arm in arms.values()} == {"model"}
    assert {arm["settings"]["dtype"] for arm in arms.values()} == {"float32"}
    assert arms[TRANSFORMERS]["settings"]["max_length"] == arms[VTOKEN]["settings"]["max_model_len"] - 2
    assert arms["vtoken, h2o 32"]["settings"].items() > arms[VTOKEN]["settings"].items()


def test_numbers_of_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--limit", "0"])
    assert "numbers from 1 up" in capsys.readouterr().err


def said(*items: list[Any], **metrics: float) -> dict[str, Any]:
    return {"metrics": metrics, "said": list(items), "seconds": 1.0}


def test_agreement_is_counted_request_by_request() -> None:
    ours = said([[-1.0, True], [-2.0, False]], [[-3.0, True], [-4.0, False]])
    theirs = said([[-1.0, True], [-2.5, False]], [[-3.1, False], [-4.0, False]])
    assert Agreement.of(ours, theirs) == Agreement(4, 3, 0.5)
    assert Agreement.of(said(["a"], ["b"]), said(["a"], ["c"])) == Agreement(2, 1, None)
    assert Agreement.of(said([-7.0]), said([-7.25])) == Agreement(1, None, 0.25)
    with pytest.raises(ValueError, match="not asked the same"):
        Agreement.of(said(["a"]), said(["a", "b"]))


def test_the_page_says_what_was_run_and_what_was_left_out(tmp_path: Path) -> None:
    tasks = [Task("choose", "which one", {}, [{}, {}]), Task("draw", "a text", {}, [{}])]
    arms = {
        TRANSFORMERS: {"choose": said([[-1.0, True]], [[-2.0, True]], acc=0.5), "draw": said(["a"], exact_match=1.0)},
        VTOKEN: {"choose": said([[-1.0, True]], [[-2.25, True]], acc=0.25), "draw": said(["b"], exact_match=0.0)},
    }
    about = dict.fromkeys(("command", "date", "model", "lm_eval", "transformers", "machine"), "x")
    text = page(tasks, arms, about | {"left_out": "a third"})
    assert "Left out: a third." in text
    assert "| choose | 2 | acc | 0.5000 | 0.2500 |" in text
    assert "| draw | 1 | exact_match | 1.0000 | 0.0000 |" in text
    assert "| choose | 2 | 2 | 0.2 |" in text
    assert "| draw | 1 | 0 | texts |" in text
    path = tmp_path / "page.md"
    path.write_text("before <a>old<b> after")
    write_between_markers(path, "new", "<a>", "<b>")
    assert path.read_text() == "before <a>\nnew\n<b> after"
