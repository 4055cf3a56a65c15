"""Recorded traffic as a workload: Azure's CSV, Mooncake's JSON lines, ShareGPT's JSON, told apart by their content."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from vtoken.base.errors import ConfigError
from vtoken.base.validation import shorten
from vtoken.bench.jobs import Job, Workload, shaped
from vtoken.bench.workloads import TOKENS_PER_WORD

_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS: Final = ("timestamp", "input_length", "output_length")
_FORMATS: Final = (
    f"Azure CSV ({','.join(_AZURE_COLUMNS)}), Mooncake JSON lines ({', '.join(_MOONCAKE_KEYS)}) or ShareGPT JSON "
    "(conversations)"
)
_USERS: Final = frozenset({"human", "user"})
_MODELS: Final = frozenset({"gpt", "assistant", "chatgpt", "bard", "bing"})

CountTokens = Callable[[str], int]


def count_by_words(text: str) -> int:
    """Tokens of an English text without a tokenizer: words x 4/3."""
    return round(len(text.split()) * TOKENS_PER_WORD)


@dataclass(frozen=True)
class _Row:
    """One request as a trace has it, `arrival` in seconds from any start; 0 tokens where there was none."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int


def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    scale: float = 1.0,
    at_once: bool = False,
    count_tokens: CountTokens | None = None,
) -> Workload:
    """The requests of a trace file, by arrival, the first one at 0 s.

    Rows with an empty prompt or answer are left out, and counted in the workload's `about`.

    Args:
        limit: take the first so many requests of the file.
        scale: multiply all lengths.
        at_once: all requests are there when the clock starts.
        count_tokens: how long a ShareGPT text is; words x 4/3 if None. The other formats say it themselves.

    Raises ConfigError, with the number of the line at fault, for what cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"trace: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace: {path} is not UTF-8 text: {error}") from None
    what, rows = _detect(path, text, count_tokens)
    jobs, num_left_out = [], 0
    for row in rows:
        if row.num_prompt_tokens and row.num_output_tokens:
            jobs.append(Job(row.arrival, row.num_prompt_tokens, row.num_output_tokens))
        else:
            num_left_out += 1
        if len(jobs) == limit:
            break
    if not jobs:
        raise ConfigError(f"trace: {path} holds no request with a prompt and an answer")
    first = min(job.arrival for job in jobs)
    jobs = [Job(job.arrival - first, job.num_prompt_tokens, job.num_output_tokens) for job in jobs]
    about = f"{what}, {path.name}: {len(jobs)} requests"
    about += f", {num_left_out} without a prompt or an answer left out" if num_left_out else ""
    about += f", lengths x {scale:g}" if scale != 1 else ""
    about += ", all at once" if at_once else ", arriving as recorded"
    return Workload(path.stem, about, shaped(jobs, scale=scale, at_once=at_once))


def _detect(path: Path, text: str, count_tokens: CountTokens | None) -> tuple[str, Iterator[_Row]]:
    """(name of the format, its rows)"""
    start = text.lstrip()
    if not start:
        raise ConfigError(f"trace: {path} is empty")
    if start[0] not in "[{":
        header = [name.strip() for name in start.splitlines()[0].split(",")]
        if set(_AZURE_COLUMNS) <= set(header):
            return "Azure trace", _azure(path, text)
    elif start[0] == "[":
        return _sharegpt_name(count_tokens), _sharegpt(path, text, count_tokens or count_by_words)
    elif '"input_length"' in start.splitlines()[0]:
        return "Mooncake trace (lengths only: what prompts share is not replayed)", _mooncake(path, text)
    raise ConfigError(f"trace: {path} is in no known format; known: {_FORMATS}")


def _azure(path: Path, text: str) -> Iterator[_Row]:
    reader = csv.DictReader(text.lstrip().splitlines(), skipinitialspace=True)
    offset = text[: len(text) - len(text.lstrip())].count("\n")  # blank lines above the header
    for record in _records(path, reader, offset):
        line = reader.line_num + offset
        if None in record or None in record.values():
            raise ConfigError(f"trace: {path}, line {line}: expected {len(reader.fieldnames or ())} columns")
        when, prompt, output = (record[name] for name in _AZURE_COLUMNS)
        try:
            arrival = datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp()  # only differences matter
        except ValueError:
            raise ConfigError(
                f"trace: {path}, line {line}: TIMESTAMP: expected a date and time, got {shorten(when)}"
            ) from None
        yield _Row(
            arrival,
            _count(path, line, "ContextTokens", prompt),
            _count(path, line, "GeneratedTokens", output),
        )


def _records(path: Path, reader: csv.DictReader[str], offset: int) -> Iterator[dict[str | Any, str | Any]]:
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        yield from reader
    except csv.Error as error:
        raise ConfigError(f"trace: {path}, line {reader.line_num + 1 + offset}: no CSV: {error}") from None


def _mooncake(path: Path, text: str) -> Iterator[_Row]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        record = _parse(path, line, content)
        if not isinstance(record, dict):
            raise ConfigError(f"trace: {path}, line {line}: expected a JSON object, got {shorten(record)}")
        missing = [key for key in _MOONCAKE_KEYS if key not in record]
        if missing:
            raise ConfigError(f"trace: {path}, line {line}: {', '.join(missing)}: missing")
        when, prompt, output = (record[key] for key in _MOONCAKE_KEYS)
        if isinstance(when, bool) or not isinstance(when, int | float) or not 0 <= when < 1e15:
            raise ConfigError(f"trace: {path}, line {line}: timestamp: expected milliseconds, got {shorten(when)}")
        yield _Row(when / 1000, _count(path, line, "input_length", prompt), _count(path, line, "output_length", output))


def _sharegpt_name(count_tokens: CountTokens | None) -> str:
    counted = "words x 4/3" if count_tokens is None else "the model's tokenizer"
    return f"ShareGPT conversations (first question and answer of each, lengths by {counted})"


def _sharegpt(path: Path, text: str, count_tokens: CountTokens) -> Iterator[_Row]:
    for index, record in enumerate(_parse(path, None, text)):
        place = f"trace: {path}, conversation {index}"
        turns = record.get("conversations", record.get("messages")) if isinstance(record, dict) else None
        if not isinstance(turns, list):
            raise ConfigError(f"{place}: conversations: expected a list, got {shorten(turns)}")
        said = [_turn(f"{place}, turn {number}", turn) for number, turn in enumerate(turns)]
        question = next((i for i, (who, _) in enumerate(said) if who in _USERS), None)
        answer = None
        if question is not None and question + 1 < len(said) and said[question + 1][0] in _MODELS:
            answer = said[question + 1][1]
        prompt = "" if question is None else said[question][1]
        yield _Row(0.0, count_tokens(prompt) if prompt else 0, count_tokens(answer) if answer else 0)


def _turn(place: str, turn: Any) -> tuple[str, str]:
    """(who, what) of one turn, in either of the two spellings there are."""
    for who, what in (("from", "value"), ("role", "content")):
        if isinstance(turn, dict) and isinstance(turn.get(who), str) and isinstance(turn.get(what), str):
            return turn[who], turn[what]
    raise ConfigError(f"{place}: expected an object with the texts 'from' and 'value', got {shorten(turn)}")


def _parse(path: Path, line: int | None, content: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        at = error.lineno if line is None and isinstance(error, json.JSONDecodeError) else line
        detail = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(f"trace: {path}, line {at or 1}: no JSON: {detail}") from None


def _count(path: Path, line: int, field: str, value: Any) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 10**8:
        raise ConfigError(f"trace: {path}, line {line}: {field}: expected a number of tokens, got {shorten(value)}")
    return number
