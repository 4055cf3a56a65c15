"""`vtoken policies`: which policies there are, what they need, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vtoken.base.errors import describe

if TYPE_CHECKING:
    from vtoken.policies.base import Policy
    from vtoken.policies.registry import PolicyEntry


def policies(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Show all there is to know of these.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything, instead of a table.")] = False,
) -> None:
    """Show the policies that --kv-policy takes, those of installed packages included.

    A policy says which tokens may die. What one looks at, protects and takes:

        vtoken policies h2o

    Parameters are set behind its name:

        vtoken generate MODEL -p TEXT --kv-policy h2o:recent=64 --kv-budget 256
    """
    entries = [_usable(entry) for entry in _entries(names or [])]
    if as_json:
        typer.echo(json.dumps([_record(entry) for entry in entries], indent=2, default=str))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for entry in entries:
        if not names:
            table.add_row(Text(_printable(entry.name)), Text(_printable(_line(entry))))
            continue
        # One fact a row: a column for each would leave none of them room in a terminal.
        name = entry.name
        for what, text in _facts(entry):
            table.add_row(Text(_printable(name)), what, Text(_printable(text)))
            name = ""
    Console().print(table)
    if not names:
        typer.echo("\nMore of one: vtoken policies NAME")


def _entries(names: list[str]) -> list[PolicyEntry]:
    """Those of these names, or all. Raises ConfigError for a name that is none, with what there is or why not."""
    from vtoken.policies.registry import list_policies, policy_class

    entries = list_policies()
    if not names:
        return entries
    known = {entry.name for entry in entries}
    for name in names:
        if name not in known:
            policy_class(name)
    return [entry for name in dict.fromkeys(names) for entry in entries if entry.name == name]


def _line(entry: PolicyEntry) -> str:
    """What a list has room for."""
    package = "" if entry.package is None else f" ({entry.package})"
    if entry.policy is None:
        return f"{entry.error}{package}"
    return (entry.about or entry.policy.source) + package


def _usable(entry: PolicyEntry) -> PolicyEntry:
    """The entry, without its policy if that cannot say what there is to show: it may be anybody's."""
    try:
        _line(entry)
        for _, text in _facts(entry):
            _printable(text)
        json.dumps(_record(entry), default=str)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return replace(entry, policy=None, error=f"it cannot be described: {describe(error)}")
    return entry


def _printable(text: str) -> str:
    """Without what no terminal takes: halves of characters."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _facts(entry: PolicyEntry) -> Iterator[tuple[str, str]]:
    """What to show of a policy, and what that is called."""
    if entry.package is not None:
        yield "package", entry.package
    if entry.error is not None:
        yield "error", entry.error
    policy = entry.policy
    if policy is None:
        return
    if entry.about:
        yield "in short", entry.about
    yield "reads", "; ".join(need.about for need in policy.needs) or "positions only"
    yield "protects", _protects(policy)
    yield "decides", _strides(policy)
    if entry.own_parameters:
        yield "also takes", ", ".join(f"{name}={value}" for name, value in entry.own_parameters.items())
    yield "source", policy.source


def _protects(policy: Policy) -> str:
    recent = policy.recent
    if isinstance(recent, float):
        last = f"the last tokens, {recent:.0%} of the budget"
    else:
        last = f"the last {policy.num_recent(0)} tokens" if policy.num_recent(0) > 1 else "the last token"
    return f"the first {policy.sinks} tokens and {last}" if policy.sinks else last


def _strides(policy: Policy) -> str:
    """Tokens from one decision to the next."""
    in_prompt = (
        "at the end of a prompt" if policy.prefill_stride is None else f"every {policy.prefill_stride} in a prompt"
    )
    longest = policy.stride or max(policy.window, 1)
    what = "on whole blocks, " if policy.whole_blocks else ""
    return f"{what}{in_prompt}, every {f'{longest} tokens' if longest > 1 else 'block'} of an answer"


def _record(entry: PolicyEntry) -> dict[str, Any]:
    policy = entry.policy
    record: dict[str, Any] = {"name": entry.name, "package": entry.package, "error": entry.error}
    if policy is None:
        return record
    return record | {
        "about": entry.about,
        "parameters": entry.parameters,
        "needs": [{"name": need.name, "about": need.about} for need in policy.needs],
        "sinks": policy.sinks,
        "recent": policy.recent,
        "stride": policy.stride,
        "prefill_stride": policy.prefill_stride,
        "window": policy.window,
        "whole_blocks": policy.whole_blocks,
        "keeps_window": policy.keeps_window,
        "source": policy.source,
    }
