"""The measurements of a sitting as JSON lines: appended as they come, so an interrupted sitting goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

Status = Literal["ok", "failed", "timeout", "skipped"]


@dataclass(frozen=True)
class Record:
    """One cell that was tried. `fingerprint` is that of all that decides the figure, see `fingerprint()`."""

    workload: str
    engine: str
    round: int
    fingerprint: str
    status: Status
    at: str  # ISO time of its end
    reason: str | None = None
    figures: dict[str, float] | None = None
    startup_s: float | None = None
    wall_s: float | None = None
    others_share: float | None = None
    version: str | None = None
    outputs: list[list[int]] | None = None  # token ids of the answers, where there was one request a run

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.workload, self.engine, self.round, self.fingerprint

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**data)


class RecordFile:
    """Append-only. Of two records with the same key the later one counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[tuple[str, str, int, str], Record] = {}
        if path.is_file():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:  # the driver was killed while it wrote: that cell runs again
                path.write_text(whole)
            for line in whole.splitlines():
                record = Record.from_json(json.loads(line))
                self._records[record.key] = record

    def add(self, record: Record) -> None:
        self._records[record.key] = record
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def get(self, workload: str, engine: str, round_: int, fingerprint: str) -> Record | None:
        return self._records.get((workload, engine, round_, fingerprint))

    @property
    def num_rounds(self) -> int:
        """Rounds that any cell has reached."""
        return max((record.round + 1 for record in self._records.values()), default=0)


def fingerprint(*parts: Any) -> str:
    """Short hash of JSON-able parts: settings, prompts, versions."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def source_hash(folder: Path, suffixes: Iterable[str] = (".py", ".cpp", ".h")) -> str:
    """Hash of a source tree: what stands for the version of an engine that is being worked on."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in set(suffixes)):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
