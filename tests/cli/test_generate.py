from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny_models, tiny_tokenizers
from tests.cli.conftest import Ran, process
from vtoken import LLM, SamplingParams

Vtoken = Callable[..., Ran]
SMALL = ("--num-blocks", "64", "--max-model-len", "auto", "--max-tokens", "8", "--temperature", "0")


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """No chat template; a token is a byte."""
    return str(tiny_models.save_llama(tmp_path_factory.mktemp("plain"), tokenizer=True))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_models.save_llama(tmp_path_factory.mktemp("chat"), vocab_size=len(tokenizer))
    return str(tiny_tokenizers.save(tokenizer, folder))


def test_json_tells_what_python_tells(vtoken: Vtoken, plain_model: str) -> None:
    ran = vtoken("generate", plain_model, "-p", "one", "-p", "two", "--json", *SMALL)
    found = [json.loads(line) for line in ran.out.splitlines()]
    with LLM(plain_model, num_blocks=64, max_model_len="auto") as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        expected = llm.generate(["one", "two"], params, use_tqdm=False)
    assert (ran.code, ran.err) == (0, "")
    assert [answer["prompt"] for answer in found] == ["one", "two"]
    assert [answer["outputs"][0]["token_ids"] for answer in found] == [o.outputs[0].token_ids for o in expected]
    assert [answer["outputs"][0]["text"] for answer in found] == [o.outputs[0].text for o in expected]
    assert all(answer["outputs"][0]["finish_reason"] == "length" for answer in found)


def test_a_lone_answer_is_printed_bare(vtoken: Vtoken, plain_model: str) -> None:
    answer = json.loads(vtoken("generate", plain_model, "-p", "one", "--json", *SMALL).out)["outputs"][0]["text"]
    assert vtoken("generate", plain_model, "-p", "one", *SMALL).out == answer.strip() + " …\n"


def test_several_answers_are_told_apart(vtoken: Vtoken, plain_model: str) -> None:
    out = vtoken("generate", plain_model, "-p", "[one]", "-p", "two", "--n", "2", *SMALL).out
    lines = out.splitlines()
    assert "[one]" in lines
    assert "two" in lines
    assert sum(line.startswith("[0] ") for line in lines) == 2
    assert sum(line.startswith("[1] ") for line in lines) == 2


@pytest.mark.parametrize("source", ["file", "-"])
def test_prompts_come_from_a_file(
    vtoken: Vtoken, plain_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    text = "one\n\ntwo\n"
    file = tmp_path / "prompts"
    file.write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    ran = vtoken("generate", plain_model, "--prompts-file", str(file) if source == "file" else "-", "--json", *SMALL)
    assert [json.loads(line)["prompt"] for line in ran.out.splitlines()] == ["one", "two"]


def test_the_chat_format_is_used_where_there_is_one(vtoken: Vtoken, chat_model: str, plain_model: str) -> None:
    def prompt_of(*line: str) -> str:
        token_ids = json.loads(vtoken("generate", *line, "--json", *SMALL).out)["prompt_token_ids"]
        with LLM(line[0], num_blocks=4, max_model_len="auto") as llm:
            text: str = llm.get_tokenizer().backend.decode(token_ids)
        return text

    told = ("-p", "Hi", "--system", "Be brief.")
    assert prompt_of(chat_model, *told) == "<|system|>Be brief.<end><|user|>Hi<end><|assistant|>"
    assert prompt_of(chat_model, "-p", "Hi") == "<|user|>Hi<end><|assistant|>"
    assert prompt_of(chat_model, *told, "--no-chat") == prompt_of(plain_model, *told) == "Be brief.\n\nHi"


def test_chat_without_a_template_is_refused(vtoken: Vtoken, plain_model: str) -> None:
    ran = vtoken("generate", plain_model, "-p", "Hi", "--chat", *SMALL)
    assert ran.code == 2
    assert ran.err.startswith("error: messages: this model has no chat template")


def test_verbose_shows_what_was_settled_at_start(vtoken: Vtoken, plain_model: str, caplog) -> None:
    vtoken("generate", plain_model, "-p", "x", "--verbose", *SMALL)
    told = "\n".join(record.message for record in caplog.records)
    assert "KV pool" in told
    assert "linear 64 -> " in told
    caplog.clear()
    logging.getLogger("vtoken").setLevel(logging.NOTSET)
    vtoken("generate", plain_model, "-p", "x", *SMALL)
    assert not caplog.records


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_answer_that_cannot_be_written(plain_model: str) -> None:
    with Path("/dev/full").open("w") as full:
        ran = process("generate", plain_model, "-p", "x", *SMALL, stdout=full.fileno())
        assert ran.communicate()[1] == "error: No space left on device: the output is not whole\n"
    assert ran.returncode == 1


def test_stats_show_what_the_memory_did(vtoken: Vtoken, plain_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    err = vtoken("generate", plain_model, "-p", "x" * 40, "--n", "3", "--stats", *SMALL).err
    figures = {line.split("  ")[0].strip(): line.split() for line in err.splitlines()}
    assert "64" in figures["pool"]
    assert "2" in figures["forks"]
    assert "24" in figures["tokens drawn"]  # 3 choices of 8
    # A choice's last token is drawn and never computed: 40 of the prompt, then 7 of each choice.
    assert "61" in figures["tokens computed"]


def test_a_prompt_beyond_the_pool_is_refused_in_one_line(vtoken: Vtoken, plain_model: str) -> None:
    ran = vtoken("generate", plain_model, "-p", "x" * 2000, *SMALL)
    assert ran.code == 2
    assert ran.err.startswith("error: prompt: 2000 tokens leave no room")
    assert ran.err.count("\n") == 1


def test_all_tokens_that_fit_may_be_asked_for(vtoken: Vtoken, plain_model: str) -> None:
    small = ("--num-blocks", "2", "--max-model-len", "auto", "--ignore-eos", "--max-tokens", "all")
    answer = json.loads(vtoken("generate", plain_model, "-p", "one", "--json", *small).out)
    assert len(answer["prompt_token_ids"]) + len(answer["outputs"][0]["token_ids"]) == 32


def test_a_model_without_a_tokenizer_is_answered_in_flags(vtoken: Vtoken, tmp_path: Path) -> None:
    ran = vtoken("generate", str(tiny_models.save_llama(tmp_path)), "-p", "x", *SMALL)
    assert ran.code == 2
    assert "give a folder that has one with --tokenizer" in ran.err
    assert "skip_tokenizer_init" not in ran.err
