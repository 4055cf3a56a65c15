"""`vtoken generate`: answer prompts from the command line."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vtoken.base.config import EngineConfig
from vtoken.base.errors import RequestError
from vtoken.base.sampling_params import SamplingParams
from vtoken.cli.options import takes

if TYPE_CHECKING:
    from vtoken.engine.llm import LLM
    from vtoken.engine.outputs import RequestOutput

DEFAULT_MAX_TOKENS = 256  # an answer to read; vLLM's 16 is a default for completions


# One policy for all prompts of a command, the engine's; and what a command line has no form for.
LEFT_OUT = (
    *("kv_policy", "kv_budget", "kv_trigger", "kv_stride", "kv_prefill_stride", "kv_prompt_end"),
    *("logit_bias", "logits_processors"),
)


@takes(SamplingParams, into="sampling", panel="Drawing tokens", leave_out=LEFT_OUT, max_tokens=DEFAULT_MAX_TOKENS)
@takes(EngineConfig, into="engine", panel="Engine", leave_out=("model", "skip_tokenizer_init", "seed"))
def generate(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file or a name: smollm2-135m.")],
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt; repeat it, and all run at once.", metavar="TEXT"),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with a prompt on each line, blank lines aside; - reads standard input.",
            allow_dash=True,
            metavar="FILE",
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="What the model is told before each prompt; with --no-chat, a paragraph in front of it.",
            metavar="TEXT",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Ask in the model's chat format, or send the prompt as it is (default: chat, if there is a format).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each prompt.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show what the memory did.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what the engine settles at start: kernels, sizes, pool.")
    ] = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer one or more prompts.

    One question:

    \b
        vtoken generate smollm2-135m -p "Why is the sky blue?"

    Two at once, sharing the memory of what they are told first (whole blocks of it, so the text must be longer than
    one block, 16 tokens):

    \b
        vtoken generate smollm2-135m --stats \\
          -p "What is rain?" -p "What is snow?" \\
          --system "You teach children: answer in one or two exact sentences."

    Four different answers to one prompt, the same on every run:

    \b
        vtoken generate smollm2-135m -p "Name a fruit." --n 4 \\
          --temperature 0.8 --seed 7

    In a small memory, 64 blocks of 16 tokens, from a file, for a script:

    \b
        vtoken generate ./my-model --prompts-file questions.txt --json \\
          --num-blocks 64 --max-model-len auto
    """
    texts = _read_prompts(prompt or [], prompts_file)
    params = SamplingParams(**sampling)
    config = EngineConfig(model=model, **engine)
    if verbose:
        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        logging.getLogger("vtoken").setLevel(logging.DEBUG)  # the kernels too
    from vtoken.engine.precheck import precheck

    precheck(config)  # torch takes seconds to import
    from vtoken.engine.llm import LLM

    with LLM(**dict(config)) as llm:
        prompts = [_prepare(llm, text, system, chat) for text in texts]
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty() and not as_json)
        for text, output in zip(texts, outputs, strict=True):
            if as_json:
                typer.echo(_as_json(text, output))
            else:
                _show(text, output, alone=len(texts) == 1)
        if stats:
            from rich.console import Console

            from vtoken.cli.report import memory_table

            Console(stderr=True).print(memory_table(llm.stats()))
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        typer.echo(f"error: {len(failed)} of {len(outputs)} prompts failed: {failed[0]}", err=True)
        raise typer.Exit(1)


def _read_prompts(prompts: list[str], file: Path | None) -> list[str]:
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except OSError as error:
            raise RequestError(f"--prompts-file: {file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise RequestError(f"--prompts-file: {file} is not UTF-8 text: {error}") from None
        prompts = prompts + [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise RequestError("no prompt; give one with -p/--prompt, or a file of them with --prompts-file")
    return prompts


def _prepare(llm: LLM, text: str, system: str | None, chat: bool | None) -> dict[str, Any]:
    """A prompt as the engine takes it: as token ids in the chat format, which brings its own special tokens."""
    tokenizer = llm.get_tokenizer()
    if chat is None:
        chat = tokenizer.has_chat_template
    if not chat:
        return {"prompt": text if system is None else f"{system}\n\n{text}"}
    messages = [] if system is None else [{"role": "system", "content": system}]
    return {"prompt_token_ids": tokenizer.encode_chat([*messages, {"role": "user", "content": text}])}


def _as_json(text: str, output: RequestOutput) -> str:
    return json.dumps({**asdict(output), "prompt": text}, ensure_ascii=False)


def _show(text: str, output: RequestOutput, alone: bool) -> None:
    """Print the choices of a prompt; the prompt itself only where there are several to tell apart."""
    if not alone:
        typer.secho(text, bold=True)
    for choice in output.outputs:
        mark = f"[{choice.index}] " if len(output.outputs) > 1 else ""
        cut = " …" if choice.finish_reason == "length" else ""
        typer.echo(f"{mark}{choice.text.strip()}{cut}")  # as it is: rich would expand tabs and wrap lines
        if choice.num_evicted:
            total = choice.num_kept + choice.num_evicted
            typer.secho(f"{mark}({choice.num_evicted} of {total} tokens were evicted on the way)", dim=True, err=True)
    if not alone:
        typer.echo()
