"""`vtoken bench`: measure, and say what came of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from vtoken.base.errors import ConfigError
from vtoken.base.validation import shorten
from vtoken.cli import files

# A message that begins with one of the settings below; those of the engine itself are spelt by `as_flags`.
_OPTION = re.compile(r"^(workload|policy|ratio|arms|copies|shape|device|pool|limit|scale|trace):")

app = typer.Typer(help="Measure what giving evicted memory back is worth.", rich_markup_mode=None)


@app.callback()
def _bench() -> None:
    """One command so far; without this Typer would leave out its name."""


@app.command("reclaim")
def reclaim(
    *,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="chat, long, reasoning or all (default); repeat it for several.", metavar="NAME"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy, as in h2o or h2o:recent=64; repeat it.", metavar="NAME"),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Share of each text that is erased: 0.3, 0.5 and 0.7; repeat it.", metavar="SHARE"),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(help="Tokens in a block: 16, 32 and 48; repeat it.", metavar="TOKENS"),
    ] = None,
    arms: Annotated[
        str | None, typer.Option(help="Some of native,naive,repack,vtoken, with commas.", metavar="NAMES")
    ] = None,
    copies: Annotated[
        str, typer.Option(help="When survivors are packed: ordered, before a step, or beside.", metavar="KIND")
    ] = "ordered",
    shape: Annotated[
        str | None, typer.Option(help="Shape of the simulated model (default llama-3.1-8b).", metavar="NAME")
    ] = None,
    device: Annotated[str | None, typer.Option(help="The simulated device (default h100).", metavar="NAME")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Run a real model on this machine instead, such as smollm2-135m.", metavar="MODEL"),
    ] = None,
    pool: Annotated[
        str, typer.Option(help="Blocks in the KV pool; auto: five requests of mean length.", metavar="BLOCKS|auto")
    ] = "auto",
    trace: Annotated[
        Path | None,
        typer.Option(help="Lengths from a file instead: Azure CSV, Mooncake JSONL, ShareGPT JSON.", metavar="FILE"),
    ] = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="All requests of the trace are there at the start.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="The most requests of a workload.", metavar="REQUESTS")] = None,
    scale: Annotated[float | None, typer.Option(help="Multiply all lengths.", metavar="FACTOR")] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and prompts.", metavar="NUMBER")] = 0,
    sweeps: Annotated[
        bool | None,
        typer.Option("--sweeps/--no-sweeps", help="Also vary how many requests may run at once.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small subset, in minutes.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to a file.", metavar="FILE")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write one page with plots (needs vtoken[bench]).", metavar="FILE")
    ] = None,
) -> None:
    """Run four arms side by side, with the same victims.

    native keeps all tokens, naive evicts and gives back only blocks in which nothing lives, repack packs what is
    fragmented, vtoken reuses dead cells and packs where that brings a block back. Each runs the same requests through
    the real scheduler, in a KV pool that is too small for them.

    A first look, on a simulated device:

    \b
        vtoken bench reclaim --quick --html reclaim.html

    The whole matrix, some hours on one core:

    \b
        vtoken bench reclaim --json reclaim.json --html reclaim.html

    One policy on a real model, by the clock of this machine:

    \b
        vtoken bench reclaim --model smollm2-135m --quick

    Recorded lengths:

    \b
        vtoken bench reclaim --trace conv.csv --limit 64 --ratio 0.5
    """
    from vtoken.bench.configure import Asked, configure

    if model is not None and (shape is not None or device is not None):
        raise ConfigError("--model: a real model runs on this machine; leave --shape and --device out")
    for path, option in ((json_file, "--json"), (html_file, "--html")):
        if path is not None:
            files.check_place(path, option)
    if html_file is not None:
        from vtoken.bench.plots import check_matplotlib

        check_matplotlib()
    defaults = Asked()
    asked = Asked(
        workloads=tuple(workload or ()),
        policies=tuple(policy or ()),
        ratios=tuple(ratio or ()),
        block_sizes=tuple(block_size or ()),
        arms=tuple(name.strip() for name in arms.split(",")) if arms is not None else (),
        copies=copies,
        shape=shape or defaults.shape,
        device=device or defaults.device,
        model=model,
        num_blocks=_blocks(pool),
        trace=trace,
        at_once=at_once,
        limit=limit,
        scale=scale,
        seed=seed,
        sweeps=sweeps,
        quick=quick,
    )
    try:
        config = configure(asked)
    except ConfigError as error:
        raise ConfigError(_OPTION.sub(r"--\1:", str(error))) from None
    from rich.console import Console

    from vtoken.bench import page, report, terminal
    from vtoken.bench.progress import progress
    from vtoken.bench.reclaim import ReclaimBench

    found = ReclaimBench(config, progress).run()
    terminal.show(found, Console())
    if json_file is not None:
        files.write(json_file, report.to_json(found), "--json")
    if html_file is not None:
        files.write(html_file, page.to_html(found), "--html")
    for path in (json_file, html_file):
        if path is not None:
            typer.echo(f"written: {path}", err=True)


def _blocks(pool: str) -> int | None:
    if pool == "auto":
        return None
    try:
        return int(pool)
    except ValueError:
        raise ConfigError(f"--pool: expected a number of blocks, or auto, got {shorten(pool)}") from None
