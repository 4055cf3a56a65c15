"""`vtoken serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vtoken.base.config import EngineConfig
from vtoken.base.errors import ConfigError
from vtoken.cli.config_file import check_key_variable, read_defaults, warn_of_unknown_variables
from vtoken.cli.options import takes
from vtoken.server.certificate import check_certificate
from vtoken.server.settings import ServerSettings

_SMALLEST_SWAP = 1 << 20  # bytes; vLLM's --swap-space counts GiB, and a number without a unit is most likely meant so


@takes(EngineConfig, into="engine", panel="Engine", leave_out=("model", "skip_tokenizer_init"))
@takes(ServerSettings, into="server", panel="Server")
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A checkpoint folder, a .gguf file or a name: smollm2-135m.", envvar="VTOKEN_MODEL", show_envvar=False
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file with options, such as 'port: 8000'.",
            metavar="FILE",
            is_eager=True,
            show_envvar=False,
            callback=read_defaults,
        ),
    ] = None,
    engine: dict[str, Any],
    server: dict[str, Any],
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Then any client of that API talks to it:

    \b
        vtoken serve smollm2-135m --max-model-len auto
        curl http://127.0.0.1:8000/v1/chat/completions \\
          -H 'Content-Type: application/json' \\
          -d '{"model": "smollm2-135m", "messages": [
               {"role": "user", "content": "Why is the sky blue?"}]}'

    To everybody who has the key, from every address:

    \b
        vtoken serve smollm2-135m --host 0.0.0.0 --api-key sesame

    Each option may also be set in the environment, --max-model-len as VTOKEN_MAX_MODEL_LEN, or in a YAML file that
    --config names. The command line counts most, then the environment, then the file.
    """
    if model is None:
        raise ConfigError("model: missing; name it behind `vtoken serve`, in VTOKEN_MODEL or in the --config file")
    check_key_variable()
    _set_up_logs(server.get("log_level", "info"))
    warn_of_unknown_variables({"model", "config", *EngineConfig.names(), *ServerSettings.names()})
    settings, engine_config = ServerSettings(**server), EngineConfig(model=model, **engine)
    if 0 < engine_config.swap_space < _SMALLEST_SWAP:
        raise ConfigError(
            f"swap_space={engine_config.swap_space} is that many bytes; write {engine_config.swap_space}GiB for GiB"
        )
    check_certificate(settings)
    from vtoken.engine.precheck import precheck

    precheck(engine_config)  # torch takes seconds to import
    from vtoken.server.run import run, take_port, url_of

    with take_port(settings) as taken:
        from vtoken.engine.async_llm import AsyncLLM
        from vtoken.server.app import create_app
        from vtoken.server.summary import summary

        llm = AsyncLLM(
            **dict(engine_config),
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
        )
        try:
            app = create_app(llm, settings, model=_name_of(model))
            for line in summary(llm.engine):
                typer.echo(line, err=True)
            url, names = url_of(taken, settings), ", ".join(app.state.server.names)

            def tell_where() -> None:
                if settings.dashboard:
                    typer.echo(f"the memory at work: {url}/dashboard", err=True)
                typer.echo(f"{names} at {url}/v1 (Ctrl-C ends it)", err=True)

            run(app, taken, tell_where)
        finally:
            llm.close()


def _name_of(model: str) -> str:
    """What clients call a model: a path of this machine is nobody's business, its last part will do."""
    path = Path(model).expanduser()
    return path.resolve().name or model if path.exists() else model


def _set_up_logs(level: str) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s: %(message)s")
    logging.getLogger("vtoken").setLevel(level.upper())
    if level == "info":  # its line on weights and pool is in the summary
        logging.getLogger("vtoken.engine").setLevel(logging.WARNING)
