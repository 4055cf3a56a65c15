from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import vtoken as package
from tests.cli.conftest import Ran, process
from vtoken.base.config import EngineConfig
from vtoken.base.sampling_params import SamplingParams

Vtoken = Callable[..., Ran]


def test_version(vtoken: Vtoken) -> None:
    assert vtoken("--version") == (0, f"vtoken {package.__version__}\n", "")


@pytest.mark.parametrize("line", [[], ["--help"], ["-h"]])
def test_help_teaches_the_first_steps(vtoken: Vtoken, line: list[str]) -> None:
    ran = vtoken(*line)
    assert ran.code == 0
    assert "vtoken models get smollm2-135m" in ran.out
    assert "vtoken generate smollm2-135m -p" in ran.out


def test_help_of_a_command_shows_examples(vtoken: Vtoken) -> None:
    out = vtoken("generate", "--help").out
    assert out.count("vtoken generate") >= 4
    assert "--kv-memory" in out


def test_help_says_what_it_is_for(vtoken: Vtoken) -> None:
    assert "an evicted token's memory comes back" in " ".join(vtoken("--help").out.split())


LEFT_OUT = {"model", "skip_tokenizer_init", "kv_prompt_end", "logit_bias", "logits_processors"}


def test_every_option_is_readable_at_80_columns(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = vtoken("generate", "--help").out
    for name in {*EngineConfig.names(), *SamplingParams.names()} - LEFT_OUT:
        assert f"--{name.replace('_', '-')}" in out
    assert "…" not in out
    usage, *lines = out.splitlines()  # the first has the name of the program, here that of the test runner
    assert usage.startswith("Usage: ")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["generate"], "Missing argument 'model'"),
        (["generate", "m"], "no prompt; give one with -p/--prompt"),
        (["generate", "m", "--nope"], "No such option: --nope"),
        (["generate", "m", "-p", "x", "--n", "0"], "n: expected a whole number from 1 to 1024, got 0"),
        (["generate", "m", "-p", "x", "--n", "two"], "'--n': expected a whole number, got 'two'"),
        (["generate", "m", "-p", "x", "--top-p", "all"], "'--top-p': expected a number, got 'all'"),
        (["generate", "m", "-p", "x", "--max-tokens", "some"], "expected a whole number or 'all', got 'some'"),
        (["generate", "m", "-p", "x", "--stop-token-ids", "a"], "'--stop-token-ids': expected a whole number"),
        (["generate", "m", "why is the sky blue?"], "give prompts with -p"),
        (["generate", "m", "-p", "x", "--temperature", "nan"], "temperature: expected a number"),
        (["generate", "m", "-p", "x", "--dtype", "int8"], "'--dtype': expected one of auto, float32, "),
        (["generate", "m", "-p", "x", "--kv-memory", "lots"], "'lots' is no size"),
        (["generate", "m", "-p", "x", "--max-model-len", "long"], "neither a whole number nor 'auto'"),
        (
            ["generate", "m", "-p", "x", "--num-blocks", "4", "--kv-memory", "1MiB"],
            "--num-blocks 4 and --kv-memory 1048576 both set",
        ),
        (["generate", "m", "-p", "x", "--swap-space", "9999TB", "--preemption", "swap"], "this host has"),
        (["generate", "m", "--prompts-file", "/nowhere/prompts"], "/nowhere/prompts cannot be read: No such file"),
        (["generate", "/nowhere/model", "-p", "x"], "/nowhere/model does not exist"),
        (["models", "get"], "Missing argument 'name'"),
        (["models", "get", "gpt-9"], "there is no model 'gpt-9' to get; there is: smollm2-135m"),
        (["model"], "No such command 'model'"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(vtoken: Vtoken, line: list[str], said: str) -> None:  # U84, U91
    ran = vtoken(*line)
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert ran.err.count("No such file") <= 1
    assert "Value error" not in ran.err
    assert ran.out == ""


def test_our_own_failure_is_one_line_and_exit_code_1(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, progress: object) -> Path:
        raise package.EngineError("the step failed")

    monkeypatch.setattr("vtoken.models.catalog.get_model", broken)
    assert vtoken("models", "get", "smollm2-135m") == (1, "", "error: the step failed\n")


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("line", [["--version"], ["--help"], ["policies"], ["policies", "--json"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(line: list[str], buffered: bool) -> None:
    with FULL.open("w") as full:
        ran = process(*line, stdout=full.fileno(), buffered=buffered)
        assert ran.communicate()[1] == "error: No space left on device: the output is not whole\n"
    assert ran.returncode == 1


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("line", [["--version"], ["policies"], ["policies", "--json"]], ids=" ".join)
def test_a_reader_who_has_seen_enough_is_told_nothing(line: list[str], buffered: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = process(*line, stdout=writing, buffered=buffered)
    os.close(writing)
    assert ran.communicate()[1] == ""
    assert ran.returncode == 1


def test_models_get_prints_the_folder_alone_on_stdout(
    vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def get_model(name: str, progress: Callable[[str], None]) -> Path:
        progress(f"getting {name}")
        return tmp_path

    monkeypatch.setattr("vtoken.models.catalog.get_model", get_model)
    assert vtoken("models", "get", "smollm2-135m") == (0, f"{tmp_path}\n", "getting smollm2-135m\n")


def test_models_list_says_what_is_here(vtoken: Vtoken, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    (before,) = [line for line in vtoken("models", "list").out.splitlines() if "smollm2-135m" in line]
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    (after,) = [line for line in vtoken("models", "list").out.splitlines() if "smollm2-135m" in line]
    assert "  no  " in before
    assert "  yes  " in after
