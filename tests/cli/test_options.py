from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vtoken.base.config import EngineConfig
from vtoken.base.sampling_params import SamplingParams
from vtoken.cli.generate import LEFT_OUT
from vtoken.cli.options import as_flags, takes


@pytest.fixture
def given() -> dict[str, Any]:
    return {}


@pytest.fixture
def app(given: dict[str, Any]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @takes(SamplingParams, into="sampling", panel="Sampling", leave_out=LEFT_OUT, max_tokens=99)
    @takes(EngineConfig, into="engine", panel="Engine", leave_out=("model", "seed"))
    def command(model: str, *, engine: dict[str, Any], sampling: dict[str, Any]) -> None:
        """About."""
        given.update(model=model, engine=engine, sampling=sampling)

    return app


def test_what_is_not_set_is_left_to_the_settings(app: typer.Typer, given: dict[str, Any]) -> None:
    assert CliRunner().invoke(app, ["m"]).exit_code == 0
    assert given == {"model": "m", "engine": {}, "sampling": {"max_tokens": 99}}


def test_every_kind_of_value_arrives_as_the_settings_take_it(app: typer.Typer, given: dict[str, Any]) -> None:
    line = "m --n 2 --temperature 0.5 --ignore-eos --stop-token-ids 3 --stop-token-ids 4 --max-tokens 7 --seed -1"
    line += " --block-size 8 --kv-memory 1.5MiB --swap-space 4096 --preemption swap --no-enable-prefix-caching"
    line += " --max-model-len auto --dtype float32 --tokenizer t"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    sampling = SamplingParams(**given["sampling"])
    assert sampling == SamplingParams(
        n=2, temperature=0.5, ignore_eos=True, stop_token_ids=(3, 4), max_tokens=7, seed=-1
    )
    config = EngineConfig(model="m", **given["engine"])
    assert (config.kv_memory, config.swap_space, config.max_model_len) == (3 * 2**19, 4096, "auto")
    assert (config.block_size, config.preemption, config.enable_prefix_caching) == (8, "swap", False)


def test_a_length_is_a_number_or_auto(app: typer.Typer, given: dict[str, Any]) -> None:
    assert CliRunner().invoke(app, ["m", "--max-model-len", "512"]).exit_code == 0
    assert given["engine"] == {"max_model_len": 512}
    assert CliRunner().invoke(app, ["m", "--max-model-len", "long"]).exit_code == 2
    assert CliRunner().invoke(app, ["m", "--kv-memory", "lots"]).exit_code == 2


def test_every_setting_is_offered_with_its_help_and_default(app: typer.Typer) -> None:
    text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output.split())
    for settings, left_out in ((SamplingParams, LEFT_OUT), (EngineConfig, ("model", "seed"))):
        for name in settings.names():
            if name not in left_out:
                assert f"--{name.replace('_', '-')}" in text
                assert as_flags(settings.model_fields[name].description or "?") in text
    assert "(default: 99)" in text
    assert "(default: 256)" in text


def test_all_is_what_python_calls_none(app: typer.Typer, given: dict[str, Any]) -> None:
    assert CliRunner().invoke(app, ["m", "--max-tokens", "all"]).exit_code == 0
    assert given["sampling"] == {"max_tokens": None}


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("set a larger kv_memory or num_blocks", "set a larger --kv-memory or --num-blocks"),
        ("max_model_len=9 is beyond it; 'auto'", "--max-model-len 9 is beyond it; 'auto'"),
        ("Set max_model_len='auto' (gives 8)", "Set --max-model-len auto (gives 8)"),
        ("give it with tokenizer=..., or not", "give it with --tokenizer ..., or not"),
        ("enable_prefix_caching=False", "--no-enable-prefix-caching"),
        ("n: expected a number", "--n: expected a number"),
        ("the tokenizer of that seed has n tokens", "the tokenizer of that seed has n tokens"),
        ("/models/num_blocks/kv_memory.gguf and ./max_tokens", "/models/num_blocks/kv_memory.gguf and ./max_tokens"),
    ],
)
def test_settings_are_spelled_as_flags_and_nothing_else_is(text: str, spelled: str) -> None:
    assert as_flags(text) == spelled
