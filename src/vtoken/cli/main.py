"""`vtoken`: the commands, and how their failures look."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, NoReturn

import typer

import vtoken
from vtoken.cli import bench, chat, eval, generate, models, policies, serve
from vtoken.cli.config_file import PREFIX
from vtoken.cli.options import as_flags, elsewhere

_ABOUT = """
An LLM engine on a paged KV cache in which an evicted token's memory comes back.

Start with a small real model (about 100 MB to download):

    vtoken models get smollm2-135m

    vtoken generate smollm2-135m -p "Why is the sky blue?"

    vtoken chat smollm2-135m

A model is a Hugging Face checkpoint folder, a .gguf file, or a name that `vtoken models list` shows.

Only `models get` ever asks the network.
"""

_CANNOT_BE_WRITTEN = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

app = typer.Typer(
    help=_ABOUT,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options off at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.add_typer(models.app, name="models")
app.command("serve", context_settings={"auto_envvar_prefix": PREFIX})(serve.serve)
app.command("policies")(policies.policies)
app.add_typer(bench.app, name="bench")
app.command("eval")(eval.evaluate)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"vtoken {vtoken.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """Entry point. A failure is one line on stderr: exit code 2 for what the user can mend, 1 for anything else."""
    try:
        code = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written should not be known only when Python ends
    except typer.TyperException as error:  # of the command line itself
        _fail(_explain(error) + "; see --help", error.exit_code)
    except (vtoken.ConfigError, vtoken.RequestError, vtoken.CheckpointError) as error:
        _fail(str(error), 2)
    except vtoken.VtokenError as error:
        _fail(str(error), 1)
    except OSError as error:
        if error.errno not in _CANNOT_BE_WRITTEN or error.filename is not None:  # of a file, and not of the output
            raise
        if sys.stdout is not None:  # Python tries once more when it ends, and would tell of that too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # whoever read it has seen enough
            sys.exit(1)
        _fail(f"{error.strerror}: the output is not whole", 1)
    sys.exit(code)


def _explain(error: typer.TyperException) -> str:
    message = error.format_message().rstrip(".")
    if "o such option" in message:
        message += elsewhere(message)
    # People type the prompt right behind the model.
    return message + "; give prompts with -p" if "unexpected extra argument" in message else message


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {as_flags(message)}", err=True)
    sys.exit(code)
