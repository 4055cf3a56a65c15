"""`vtoken eval`: what eviction costs in quality."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from vtoken.base.config import EngineConfig
from vtoken.base.errors import ConfigError
from vtoken.base.validation import shorten
from vtoken.cli import files
from vtoken.cli.options import as_flags, read_budget, takes

if TYPE_CHECKING:
    from vtoken.evals.setting import Setting
    from vtoken.evals.task import Task

OWN: Final = ("kv_policy", "kv_budget", "kv_trigger", "kv_stride", "kv_prefill_stride", "kv_cache_dtype")
NOT_HERE: Final = ("model", "skip_tokenizer_init", "seed", "kv_mode", "on_pressure", "admission_evicts", *OWN)

WINDOW: Final = 2048
WINDOW_STRIDE: Final = 64
HAYSTACKS: Final = (512, 1024)
DEPTHS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
LIMITS: Final = {"perplexity": 4, "needle": 2, "qa": 50}
MOST_LIMIT: Final = 1_000_000

TaskName = Literal["perplexity", "needle", "qa"]


@takes(EngineConfig, into="engine", panel="Engine", leave_out=NOT_HERE)
def evaluate(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file or a name: smollm2-135m.")],
    *,
    task: Annotated[
        TaskName,
        typer.Option(help="A long text read to its end, numbers hidden in a text, or questions on paragraphs."),
    ] = "perplexity",
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", "--kv-policy", help="A policy that `vtoken policies` shows; repeat it.", metavar="NAME"
        ),
    ] = None,
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            "--kv-budget",
            help="Tokens of a text that stay, or a share of it; repeat it.",
            metavar="TOKENS|SHARE",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--kv-cache-dtype", help="A format of the KV cache; repeat it. (default: auto)", metavar="FORMAT"),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="What is read, or what needles are hidden in. (default: one that comes along)", metavar="FILE"
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help='Questions for qa: JSON lines of "context", "question" and "answers", or SQuAD\'s JSON.',
            metavar="FILE",
        ),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            help=f"Tokens of a window (perplexity, default {WINDOW}) or of a haystack (needle, default "
            f"{' and '.join(map(str, HAYSTACKS))}; repeat it).",
            metavar="TOKENS",
        ),
    ] = None,
    depths: Annotated[
        list[float] | None,
        typer.Option(
            "--depth",
            help="Where needles lie, from 0 (first) to 1 (last); repeat it. (default: "
            f"{', '.join(f'{depth:g}' for depth in DEPTHS)})",
            metavar="SHARE",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="The most windows (perplexity), needles of each depth and length, or questions (qa). (default: "
            f"{', '.join(map(str, LIMITS.values()))})",
            metavar="NUMBER",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws needles and questions.", metavar="NUMBER")] = 0,
    question_known: Annotated[
        bool,
        typer.Option(
            "--question-known/--no-question-known",
            help="Needle, qa: tokens die when the question has been read, instead of before it.",
        ),
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option("--kv-stride", help="Tokens from one eviction to the next behind the prompt.", metavar="TOKENS"),
    ] = None,
    prefill_stride: Annotated[
        int | None,
        typer.Option(
            "--kv-prefill-stride",
            help=f"The same in the prompt; 0: at its end. (default: perplexity {WINDOW_STRIDE}, or the policy's window "
            "if that is longer; else the policy's own)",
            metavar="TOKENS",
        ),
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all figures there.", metavar="FILE")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw memory against quality there: .png, .svg, .pdf (needs matplotlib).", metavar="FILE"),
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Measure what eviction costs in quality, against the full cache.

    Perplexity of a long text, read in half and in an eighth of its memory:

    \b
        vtoken eval smollm2-135m --policy h2o --policy streaming_llm \\
          --budget 1024 --budget 256

    Numbers hidden in a text, found again from a quarter of it, in two KV formats:

    \b
        vtoken eval smollm2-135m --task needle --policy snapkv --budget 0.25 \\
          --kv-cache-dtype auto --kv-cache-dtype int8 --plot needle.svg

    Questions from a file:

    \b
        vtoken eval smollm2-135m --task qa --file questions.jsonl --limit 100 \\
          --policy keydiff --budget 0.5
    """
    from rich.console import Console

    from vtoken.evals import plot as plots
    from vtoken.evals.evaluate import evaluate as run
    from vtoken.evals.report import cell_tables, headline, main_table, to_json
    from vtoken.evals.setting import make_grid

    with _named_as_flags():
        _check(
            task,
            text=text,
            file=file,
            depths=depths,
            limit=limit,
            lengths=lengths,
            seed=seed,
            question_known=question_known,
        )
        for path, option in ((as_json, "--json"), (plot, "--plot")):
            if path is not None:
                files.check_place(path, option)
        if plot is not None:
            plots.check_plot(plot)
        grid = make_grid(
            policies or [],
            [read_budget(budget) for budget in budgets or []],
            formats or ["auto"],
            stride=stride,
            prefill_stride=prefill_stride,
            least_prefill_stride=WINDOW_STRIDE if task == "perplexity" else None,
        )
        what = _task(
            task,
            text=text,
            file=file,
            lengths=tuple(lengths or ()),
            depths=tuple(depths or DEPTHS),
            limit=limit or LIMITS[task],
            seed=seed,
            question_known=question_known,
        )
    with _named_as_flags(), _Progress() as progress:
        found = run(model, what, grid, engine, progress.begin)
    console = Console()
    for title, table in ((headline(found), main_table(found)), *cell_tables(found)):
        # Rather a line too long for the terminal than figures cut short.
        wanted = console.measure(table, options=console.options.update_width(1000)).maximum
        console.print(title, soft_wrap=True, highlight=False)
        console.print(table, width=max(console.width, wanted), crop=False)
        console.print()
    # Behind the tables: a full disk must not take what was found with it.
    if as_json is not None:
        files.write(as_json, json.dumps(to_json(found), indent=1, ensure_ascii=False) + "\n", "--json")
    if plot is not None:
        with _named_as_flags():
            plots.draw(found, plot)


@contextmanager
def _named_as_flags() -> Iterator[None]:
    """What is wrong with an option of this command is said of it as it is written here."""
    try:
        yield
    except ConfigError as error:
        name, _, rest = str(error).partition(":")
        if name not in (
            "policy",
            "budget",
            "text",
            "file",
            "length",
            "depth",
            "limit",
            "seed",
            "plot",
            "question-known",
        ):
            raise
        raise ConfigError(f"--{name}:{rest}") from None


def _check(
    task: str,
    *,
    text: Path | None,
    file: Path | None,
    depths: list[float] | None,
    limit: int | None,
    lengths: list[int] | None,
    seed: int,
    question_known: bool,
) -> None:
    """Raise ConfigError for options that another task has, and for numbers that mean nothing."""
    given = {
        "text": (text, ("perplexity", "needle")),
        "file": (file, ("qa",)),
        "depth": (depths, ("needle",)),
        "length": (lengths, ("perplexity", "needle")),
        "question-known": (question_known or None, ("needle", "qa")),
    }
    for option, (value, tasks) in given.items():
        if value is not None and value != [] and task not in tasks:
            raise ConfigError(f"{option}: the task {task} takes none; it is for {' and '.join(tasks)}")
    if task == "qa" and file is None:
        raise ConfigError("file: the task qa needs a file of questions; give one with --file")
    if task == "perplexity" and lengths is not None and len(lengths) > 1:
        raise ConfigError("length: the task perplexity takes one length of a window")
    if limit is not None and not 1 <= limit <= MOST_LIMIT:
        raise ConfigError(f"limit: expected a whole number from 1 to {MOST_LIMIT}, got {shorten(limit)}")
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed: expected a whole number from -2**63 to 2**64 - 1, got {shorten(seed)}")
    for length in lengths or ():
        if length < 4:
            raise ConfigError(f"length: expected a whole number of tokens from 4 up, got {shorten(length)}")
    for depth in depths or ():
        if not 0 <= depth <= 1:
            raise ConfigError(f"depth: expected a share from 0 to 1, got {depth:g}")


def _task(
    name: str,
    *,
    text: Path | None,
    file: Path | None,
    lengths: tuple[int, ...],
    depths: tuple[float, ...],
    limit: int,
    seed: int,
    question_known: bool,
) -> Task:
    """The task, with what it reads. Raises ConfigError for files that cannot be used."""
    from vtoken.evals.needle import Needle
    from vtoken.evals.perplexity import Perplexity
    from vtoken.evals.qa import QuestionAnswering
    from vtoken.evals.squad import read_questions
    from vtoken.evals.texts import read_text

    if name == "perplexity":
        return Perplexity(read_text(text), lengths[0] if lengths else WINDOW, limit)
    if name == "needle":
        return Needle(read_text(text), lengths or HAYSTACKS, depths, limit, seed, question_known)
    assert file is not None, "checked before"
    return QuestionAnswering(file.name, read_questions(file), limit, seed, question_known)


class _Progress:
    """A bar on standard error, where that is a terminal; it begins when it is known how much there is to do."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc="loading", unit="text", disable=not sys.stderr.isatty(), file=sys.stderr)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def begin(self, total: int) -> Callable[[Setting], None]:
        self._bar.reset(total)

        def advance(setting: Setting) -> None:
            self._bar.set_description(as_flags(str(setting)), refresh=False)
            self._bar.update()

        return advance
