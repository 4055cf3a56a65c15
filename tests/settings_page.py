"""`docs/settings.md`, made from the fields themselves: python -m tests.settings_page writes it."""

from __future__ import annotations

from pathlib import Path

from vtoken.base.config import EngineConfig
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.validation import Settings
from vtoken.cli import chat, generate
from vtoken.server.settings import ServerSettings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

_HEAD = f"""# Settings

Made from the fields by `python -m tests.settings_page`; a test holds this page against them. The command line has the
same names as flags, `max_model_len` as `--max-model-len`, and other defaults: `max_tokens` is \
{SamplingParams().max_tokens} in Python, as in vLLM,
{generate.DEFAULT_MAX_TOKENS} for `vtoken generate` and {chat.DEFAULT_MAX_TOKENS} for `vtoken chat`, where `all` \
stands for Python's `None`; `vtoken chat` has `max_model_len`
"auto".
"""


def page() -> str:
    engine = _section("The engine", "Given to `LLM(model, ...)`; checked by `EngineConfig`.", EngineConfig)
    request = _section("One request", "Given to `SamplingParams(...)`.", SamplingParams)
    server = _section("The server", "Given to `vtoken serve`; checked by `ServerSettings`.", ServerSettings)
    return "\n".join([_HEAD, engine, request, server])


def _section(title: str, about: str, settings: type[Settings]) -> str:
    rows = [
        f"| `{name}` | {_cell(field.description)} | {_cell(settings.expectation(name))} | {_default(settings, name)} |"
        for name, field in settings.model_fields.items()
    ]
    return "\n".join(
        [f"## {title}", "", about, "", "| name | meaning | value | default |", "|---|---|---|---|", *rows, ""]
    )


def _default(settings: type[Settings], name: str) -> str:
    field = settings.model_fields[name]
    return "required" if field.is_required() else f"`{field.default!r}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
