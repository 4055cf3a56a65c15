"""--structured-outputs takes JSON, as the settings have it."""

from __future__ import annotations

import pytest
import typer

from vtoken.base.sampling_params import SamplingParams
from vtoken.cli.options import takes


def read(*words: str) -> SamplingParams:
    got: list[SamplingParams] = []
    app = typer.Typer()

    @app.command()
    @takes(
        SamplingParams, into="sampling", panel="Sampling", leave_out=("logit_bias", "logits_processors", "kv_budget")
    )
    def command(*, sampling: dict) -> None:
        got.append(SamplingParams(**sampling))

    app(list(words), standalone_mode=False)
    return got[0]


def test_a_form_is_given_as_json() -> None:
    params = read("--structured-outputs", '{"json": {"type": "integer"}}', "--bad-words", "no", "--bad-words", "never")
    assert params == SamplingParams(structured_outputs={"json": {"type": "integer"}}, bad_words=["no", "never"])


@pytest.mark.parametrize("text", ["[0-9]+", "{", '"regex"'])
def test_what_is_no_object_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a JSON object such as"):
        read("--structured-outputs", text)
