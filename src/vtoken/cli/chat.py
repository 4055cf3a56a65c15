"""`vtoken chat`: talk with a model in the terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vtoken.base.config import EngineConfig
from vtoken.base.errors import EngineError, RequestError
from vtoken.base.sampling_params import SamplingParams
from vtoken.cli.conversation import Conversation
from vtoken.cli.generate import LEFT_OUT
from vtoken.cli.options import as_flags, takes

if TYPE_CHECKING:
    from vtoken.engine.llm import LLM
    from vtoken.engine.stats import EngineStats

DEFAULT_MAX_TOKENS = 512
SEVERAL = ("n", "best_of", "use_beam_search", "length_penalty", "early_stopping")  # a talk has one answer a turn

_HELP = """\
/reset         start a new conversation
/system TEXT   tell the model TEXT before everything; without TEXT, nothing
/stats         what the memory holds, and how fast the last answer was
/help          this list
/exit          end; so does Ctrl-D
Ctrl-C stops an answer. A message that begins with a slash: write two."""


@takes(
    SamplingParams,
    into="sampling",
    panel="Drawing tokens",
    leave_out=(*LEFT_OUT, *SEVERAL, "logprobs", "prompt_logprobs", "kv_pin"),
    max_tokens=DEFAULT_MAX_TOKENS,
)
@takes(
    EngineConfig,
    into="engine",
    panel="Engine",
    leave_out=("model", "skip_tokenizer_init", "seed"),
    max_model_len="auto",
)
def chat(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file or a name: smollm2-135m.")],
    *,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before everything.", metavar="TEXT")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with a Jinja template instead of the model's own.", metavar="FILE")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what the engine settles at start: kernels, sizes, pool.")
    ] = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with a model.

    \b
        vtoken chat smollm2-135m --system "You are brief."

    Ctrl-C stops an answer, Ctrl-D ends; /help lists what else there is.

    A long talk in a small memory, where the tokens that matter least make room:

    \b
        vtoken chat smollm2-135m --num-blocks 64 --kv-policy h2o --kv-budget 512

    From a pipe, each line is a message, and only the answers are printed:

    \b
        printf 'Name a fruit.\\nAnother one.\\n' | vtoken chat smollm2-135m
    """
    params = SamplingParams(**sampling)
    config = EngineConfig(model=model, **engine)
    if verbose:
        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        logging.getLogger("vtoken").setLevel(logging.DEBUG)  # the kernels too
    template = None if chat_template is None else _read(chat_template)
    from vtoken.engine.precheck import precheck

    precheck(config)  # torch takes seconds to import
    from vtoken.engine.llm import LLM

    with LLM(**dict(config)) as llm:
        if template is None and not llm.get_tokenizer().has_chat_template:
            raise RequestError(
                "this model has no chat template; give one with --chat-template FILE, or let it go on with plain text: "
                "vtoken generate --no-chat"
            )
        talk = Conversation(llm, params, system, template)
        failed = _talk(talk, llm, is_terminal=sys.stdin.isatty())
    if failed:
        raise typer.Exit(1)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--chat-template: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"--chat-template: {file} is not UTF-8 text: {error}") from None


def _talk(talk: Conversation, llm: LLM, *, is_terminal: bool) -> bool:
    """Read messages until there are no more. Returns whether one failed that nobody was there to see."""
    failed = False
    if is_terminal:
        typer.secho("Ctrl-C stops an answer, Ctrl-D ends, /help tells more.", dim=True)
    while True:
        try:
            line = _next_line(is_terminal)
            if line is None or line in ("/exit", "/quit"):
                return failed
            if not line:
                continue
            if line.startswith("/") and not line.startswith("//"):
                failed |= not _command(line, talk, llm) and not is_terminal
                continue
            _answer(talk, line.removeprefix("/") if line.startswith("//") else line)
        except (RequestError, EngineError) as error:
            typer.echo(f"error: {as_flags(str(error))}", err=True)
            failed |= not is_terminal
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            typer.echo()


def _next_line(is_terminal: bool) -> str | None:
    """The next line without the spaces around it; None at the end."""
    if is_terminal:
        import readline  # noqa: F401  # `input` then has history and editing
    try:
        return input("> " if is_terminal else "").strip()
    except EOFError:
        if is_terminal:
            typer.echo()
        return None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8 text: {error}") from None


def _answer(talk: Conversation, message: str) -> None:
    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    turn = talk.ask(message, show)
    typer.echo(" …" if turn.is_cut or turn.output.outputs[0].finish_reason == "abort" else "")
    if turn.is_full:
        full = f"(the conversation is full, {turn.num_tokens} tokens: /reset starts a new one; "
        typer.secho(full + "a longer one may fit with --kv-policy and --kv-budget)", dim=True, err=True)
    elif turn.is_cut:
        typer.secho(f"(cut after {len(turn.output.outputs[0].token_ids)} tokens: --max-tokens)", dim=True, err=True)


def _command(line: str, talk: Conversation, llm: LLM) -> bool:
    """Do what a line with a slash asks for. Returns whether it was known."""
    name, _, rest = line.partition(" ")
    if name == "/reset":
        talk.reset()
    elif name == "/system":
        talk.system = rest.strip() or None
    elif name == "/stats":
        typer.echo(_stats(talk, llm.stats()))
    elif name == "/help":
        typer.echo(_HELP)
    else:
        typer.echo(f"there is no {name}; /help lists what there is", err=True)
        return False
    return True


def _stats(talk: Conversation, stats: EngineStats) -> str:
    usage = stats.usage
    lines = [
        f"pool          {usage.num_blocks} blocks of {usage.block_size} tokens: {usage.held_blocks} held, "
        f"{usage.cached_blocks} cached, {usage.free_blocks} free"
    ]
    turn = talk.last
    if turn is None:
        return "\n".join([*lines, "conversation  nothing was said yet"])
    choice = turn.output.outputs[0]
    return "\n".join(
        [
            *lines,
            f"conversation  {talk.num_messages} messages, {turn.num_tokens} tokens of at most {stats.max_model_len}",
            f"last turn     {len(turn.output.prompt_token_ids)} tokens in, {turn.output.num_cached_tokens} of them "
            f"from the cache; {len(choice.token_ids)} out; at its end {choice.num_kept} kept, "
            f"{choice.num_evicted} evicted",
            f"speed         {turn.tokens_per_second:.1f} tokens a second, the first after "
            f"{turn.first_token_seconds:.2f} s",
        ]
    )
