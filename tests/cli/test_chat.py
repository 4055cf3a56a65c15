"""`vtoken chat`, driven through a pipe, and once with somebody at the keyboard."""

from __future__ import annotations

import builtins
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny_models, tiny_tokenizers
from tests.cli.conftest import Ran
from vtoken import LLM, SamplingParams
from vtoken.cli.conversation import Conversation
from vtoken.executor.local import LocalExecutor

Vtoken = Callable[..., Ran]
SMALL = ("--num-blocks", "64", "--max-tokens", "8", "--temperature", "0")
CUT = "(cut after 8 tokens: --max-tokens)\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_models.save_llama(tmp_path_factory.mktemp("chat"), vocab_size=len(tokenizer))
    return str(tiny_tokenizers.save(tokenizer, folder))


@pytest.fixture
def say(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run the command with lines on standard input."""

    def call(text: str, *arguments: str) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape"))))
        return vtoken("chat", *arguments)

    return call


def answers(model: str, *conversation: str, system: str | None = None) -> list[str]:
    """What the model says to each message, with all that came before."""
    with LLM(model, num_blocks=64, max_model_len="auto") as llm:
        messages = [] if system is None else [{"role": "system", "content": system}]
        said = []
        for text in conversation:
            messages.append({"role": "user", "content": text})
            [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            said.append(output.outputs[0].text)
            messages.append({"role": "assistant", "content": said[-1]})
        return said


def test_each_line_is_a_message_and_the_talk_is_remembered(say, model: str) -> None:
    expected = answers(model, "one", "two")
    assert say("one\n\n  two \n", model, *SMALL) == (0, "".join(f"{text} …\n" for text in expected), CUT * 2)


def test_reset_forgets_and_system_is_told_first(say, model: str) -> None:
    expected = [*answers(model, "one"), *answers(model, "one"), *answers(model, "one", system="Be brief.")]
    ran = say("one\n/reset\none\n/reset\n/system Be brief.\none\n", model, *SMALL)
    assert ran.out == "".join(f"{text} …\n" for text in expected)
    ran = say("one\n/reset\n/system\none\n/exit\nnever\n", model, "--system", "Be brief.", *SMALL)
    assert ran.out == "".join(f"{text} …\n" for text in [expected[2], expected[0]])


def test_two_slashes_are_one_of_a_message(say, model: str) -> None:
    assert say("//stats\n", model, *SMALL).out == answers(model, "/stats")[0] + " …\n"


def test_stats_tell_what_memory_holds(say, model: str) -> None:
    out = say("/stats\n" + "a long message, so that blocks are full\n/stats\nmore\n/stats\n", model, *SMALL).out
    assert "conversation  nothing was said yet" in out
    assert re.search(r"pool          64 blocks of 16 tokens: 0 held, 0 cached, 64 free", out)
    assert "conversation  2 messages, " in out
    assert "conversation  4 messages, " in out
    cached = [int(found) for found in re.findall(r"tokens in, (\d+) of them from the cache; 8 out", out)]
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[1] % 16 == 0
    assert out.count("0 evicted") == 2
    assert len(re.findall(r"speed         \d+\.\d tokens a second, the first after \d+\.\d\d s", out)) == 2


def test_with_a_budget_tokens_make_room(say, model: str) -> None:
    talk = "".join(f"message {i} with some words\n" for i in range(8)) + "/stats\n"
    small = ("--num-blocks", "8", "--max-tokens", "8", "--temperature", "0", "--ignore-eos")
    budget = ("--kv-policy", "streaming_llm", "--kv-budget", "48", "--kv-prefill-stride", "32")
    ran = say(talk, model, *small, *budget, "--kv-trigger", "always")
    assert ran.code == 0
    [kept, evicted] = map(int, re.search(r"at its end (\d+) kept, (\d+) evicted", ran.out).groups())
    assert kept <= 8 * 16
    assert evicted > 100
    without = say(talk, model, *small)
    assert without.code == 1
    assert "--max-model-len 128; /reset starts a new one" in without.err


def test_a_full_conversation_says_so_and_what_to_do(say, model: str) -> None:
    size = ("--num-blocks", "64", "--max-model-len", "64", "--max-tokens", "all")
    ran = say("one\ntwo\n/reset\none\n", model, *size, "--temperature", "0", "--ignore-eos")
    full = "(the conversation is full, 64 tokens: /reset starts a new one"
    assert ran.err.count(full) == 2
    assert "error: with this message the conversation has" in ran.err
    assert ran.code == 1


def test_unknown_commands_are_not_sent(say, model: str) -> None:
    ran = say("/nope\n/help\n", model, *SMALL)
    assert ran.err == "there is no /nope; /help lists what there is\n"
    assert all(name in ran.out for name in ("/reset", "/system TEXT", "/stats", "/help", "/exit"))
    assert ran.code == 1


def test_bytes_that_are_no_text_are_refused(say, model: str) -> None:
    ran = say("\udcff\udcfe\n", model, *SMALL)
    assert ran.code == 2
    assert "standard input is not UTF-8 text" in ran.err


def test_without_a_template_it_does_not_start_but_takes_one(say, tmp_path: Path) -> None:
    plain = str(tiny_models.save_llama(tmp_path / "model", tokenizer=True))
    ran = say("one\n", plain, *SMALL)
    assert ran.code == 2
    assert "no chat template; give one with --chat-template FILE" in ran.err
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    ran = say("one\n", plain, "--chat-template", str(template), *SMALL)
    assert ran.code == 0
    with LLM(plain, num_blocks=64, max_model_len="auto") as llm:
        [expected] = llm.generate("one", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert ran.out == expected.outputs[0].text + " …\n"
    assert "cannot be read" in say("", plain, "--chat-template", str(tmp_path / "none"), *SMALL).err


def test_an_answer_that_fails_is_said_and_forgotten(say, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, execute, calls = answers(model, "two"), LocalExecutor.execute, []

    def failing(self, plan):
        calls.append(plan)
        if len(calls) == 1:
            raise RuntimeError("no luck")
        return execute(self, plan)

    monkeypatch.setattr(LocalExecutor, "execute", failing)
    ran = say("one\ntwo\n", model, *SMALL)
    assert "error: RuntimeError: no luck" in ran.err
    assert ran.out == expected[0] + " …\n"
    assert ran.code == 1


def test_at_a_terminal(vtoken: Vtoken, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the prompt does nothing, in an answer it ends the answer; what fails does not end the talk."""
    lines = iter([KeyboardInterrupt, "one", "/nope", "two", EOFError])
    prompts, calls, execute = [], [], LocalExecutor.execute

    def typed(prompt: str) -> str:
        prompts.append(prompt)
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    def interrupted(self, plan):
        calls.append(plan)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return execute(self, plan)

    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setattr(builtins, "input", typed)
    monkeypatch.setattr(LocalExecutor, "execute", interrupted)
    ran = vtoken("chat", model, *SMALL)
    assert prompts == ["> "] * 5
    assert ran.code == 0
    assert "Ctrl-C stops an answer, Ctrl-D ends" in ran.out
    assert ran.out.count(" …\n") == 2
    assert "there is no /nope" in ran.err
    assert ran.err.count(CUT) == 1


def test_a_stopped_answer_leaves_nothing_and_is_remembered(model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(model, num_blocks=64, max_model_len="auto") as llm:
        talk, pieces = Conversation(llm, params, None, None), []

        def show(piece: str) -> None:
            pieces.append(piece)
            if len(pieces) == 5:
                raise KeyboardInterrupt

        turn = talk.ask("one", show)
        assert turn.output.outputs[0].finish_reason == "abort"
        assert turn.output.outputs[0].text.startswith("".join(pieces))
        assert talk.num_messages == 2
        assert not llm.engine.has_unfinished_requests()
        assert llm.stats().usage.held_blocks == 0
        assert len(talk.ask("two", pieces.append).output.outputs[0].token_ids) == 30


def test_help_shows_examples(vtoken: Vtoken) -> None:
    out = vtoken("chat", "--help").out
    assert out.count("vtoken chat") >= 4
    assert "--kv-budget" in out
    assert "--n " not in out
