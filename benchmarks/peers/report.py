"""Tables and JSON out of the records of a sitting."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks import pages
from benchmarks.peers.engines import ENGINES, TARGETS, Target
from benchmarks.peers.figures import Goal, Spread, common_prefix, paired_ratios
from benchmarks.peers.records import Record
from benchmarks.peers.workloads import Workload

BEGIN: Final = "<!-- peers:begin -->"
END: Final = "<!-- peers:end -->"
OURS: Final = "vtoken"  # ratios are against this engine
DISTURBED: Final = 0.1  # share of the CPU that others took in a cell, above which the report says so

Column = tuple[str, Callable[[list[Record]], str]]  # heading, and the text for the good records of an engine


def figure(name: str, digits: int) -> Callable[[list[Record]], str]:
    """Median and range of a figure over the rounds."""

    def text(records: list[Record]) -> str:
        values = [record.figures[name] for record in records if record.figures and name in record.figures]
        if not values:
            return "-"
        spread = Spread.of(values)
        if len(values) == 1:
            return f"{spread.median:,.{digits}f}"
        return f"{spread.median:,.{digits}f} ({spread.low:,.{digits}f}-{spread.high:,.{digits}f})"

    return text


def percentiles(name: str, digits: int) -> Callable[[list[Record]], str]:
    """p50 / p95 / p99 of a wait, medians over the rounds."""

    def text(records: list[Record]) -> str:
        found = []
        for p in (50, 95, 99):
            key = f"{name}_p{p}_s"
            values = [record.figures[key] for record in records if record.figures and key in record.figures]
            found.append(f"{statistics.median(values):.{digits}f}" if values else "-")
        return " / ".join(found)

    return text


COLUMNS: Final[dict[str, list[Column]]] = {
    "batch": [
        ("seconds", figure("seconds", 1)),
        ("output tok/s", figure("output_tok_s", 0)),
        ("all tok/s", figure("total_tok_s", 0)),
    ],
    "latency": [
        ("seconds", figure("seconds", 2)),
        ("output tok/s", figure("output_tok_s", 1)),
        ("first token, s", figure("first_token_s", 3)),
        ("tok/s after it", figure("decode_tok_s", 1)),
    ],
    "prefill": [("seconds", figure("seconds", 2)), ("prompt tok/s", figure("total_tok_s", 0))],
    "arrivals": [
        ("first token p50 / p95 / p99, s", percentiles("first_token", 2)),
        ("between tokens p50 / p95 / p99, s", percentiles("between_tokens", 3)),
        ("good requests", figure("good_share", 2)),
        ("goodput, requests/s", figure("goodput_requests_s", 2)),
        ("worked on after the last arrival, s", figure("backlog_s", 1)),
    ],
}


class Report:
    """Reads the records of one sitting; `facts` are about the machine, `rate` is W5's."""

    def __init__(
        self,
        workloads: Sequence[Workload],
        records: Sequence[Record],
        facts: dict[str, Any],
        rate: float | None,
        goal: Goal,
    ) -> None:
        self._workloads = workloads
        self._records = records
        self._facts = facts
        self._rate = rate
        self._goal = goal

    def good(self, workload: str, engine: str) -> list[Record]:
        return [r for r in self._records if (r.workload, r.engine, r.status) == (workload, engine, "ok")]

    def ratio(self, workload: str, engine: str, ours: str = OURS, figure: str = "seconds") -> Spread | None:
        """How many times as long an engine takes as ours, round by round; None where one of them has no figure."""
        by_round = [
            {r.round: r.figures[figure] for r in self.good(workload, name) if r.figures} for name in (engine, ours)
        ]
        ratios = paired_ratios(*by_round)
        return Spread.of(ratios) if ratios else None

    def best_peer(self, target: Target) -> str | None:
        """The quickest of a target's peers, by its median."""
        medians = {
            peer: statistics.median(r.figures["seconds"] for r in found if r.figures)
            for peer in target.peers
            if (found := self.good(target.workload, peer))
        }
        return min(medians, key=lambda peer: medians[peer]) if medians else None

    def agreement(self, engine: str) -> str:
        """Share of W3's greedy answers that equals ours from the beginning."""
        ours, theirs = self.good("W3", OURS), self.good("W3", engine)
        if not ours or not theirs or ours[0].outputs is None or theirs[0].outputs is None:
            return "-"
        pairs = list(zip(ours[0].outputs, theirs[0].outputs, strict=True))
        return f"{sum(common_prefix(a, b) for a, b in pairs) / sum(len(a) for a, _ in pairs):.0%}"

    def markdown(self) -> str:
        """Everything between the markers."""
        parts = [self._about()]
        parts += [self._table(workload) for workload in self._workloads]
        parts.append(self._targets())
        return "\n\n".join(part for part in parts if part)

    def to_json(self) -> dict[str, Any]:
        """The same as data: facts, settings, every record (without the token ids)."""
        names = sorted({record.engine for record in self._records})
        return {
            "facts": self._facts,
            "w5": {"requests_per_s": self._rate, "goal": asdict(self._goal)},
            "engines": {name: ENGINES[name].to_json() for name in names},
            "workloads": [asdict(workload) for workload in self._workloads],
            "agreement_w3": {name: self.agreement(name) for name in names},
            "records": [
                {key: value for key, value in asdict(record).items() if key != "outputs"} for record in self._records
            ],
        }

    def _about(self) -> str:
        facts = self._facts
        machine = f"{facts['cores']} cores of {facts['cpu']} ({', '.join(facts['flags'])}), {facts['memory_gib']} GiB"
        when = sorted(record.at for record in self._records)
        lines = [f"`python -m benchmarks.peers`, {machine}; {when[0][:16]} to {when[-1][:16]}." if when else ""]
        lines.append(
            "Median of the rounds, least and greatest in brackets; engines took turns, each in a process of its own. "
            f"*against {OURS}*: how many times as long the engine took in the same round (in W5: the median wait for a "
            "first token); above 1, ours is faster."
        )
        disturbed = [r for r in self._records if (r.others_share or 0) > DISTURBED]
        if disturbed:
            worst = max(r.others_share or 0 for r in disturbed)
            lines.append(
                f"In {len(disturbed)} of {len(self._records)} cells other processes took more than {DISTURBED:.0%} of "
                f"the CPU (at most {worst:.0%}): those figures are too slow by at least as much."
            )
        return "\n".join(line for line in lines if line)

    def _table(self, workload: Workload) -> str:
        tried = [
            name for name in ENGINES if any((r.workload, r.engine) == (workload.name, name) for r in self._records)
        ]
        if not tried:
            return ""
        columns = COLUMNS[workload.kind]
        against = "first_token_p50_s" if workload.kind == "arrivals" else "seconds"
        headings = ["engine", "held as", *(heading for heading, _ in columns), f"against {OURS}", "start, s"]
        if workload.kind == "latency":
            headings.append("same tokens")
        rows = []
        for name in tried:
            good = self.good(workload.name, name)
            if not good:
                failed = next(r for r in self._records if (r.workload, r.engine) == (workload.name, name))
                reason = (failed.reason or failed.status).replace("|", "/")[:160]
                rows.append([name, ENGINES[name].precision, f"none: {reason}", *[""] * (len(headings) - 3)])
                continue
            ratio = self.ratio(workload.name, name, figure=against)
            row = [name, ENGINES[name].precision, *(text(good) for _, text in columns)]
            row += [_times(ratio), figure_of(good, lambda record: record.startup_s, 0)]
            if workload.kind == "latency":
                row.append(self.agreement(name))
            rows.append(row)
        title = f"**{workload.name}**, {workload.title}"
        if workload.kind == "arrivals" and self._rate is not None:
            title += (
                f": {workload.num_requests} at {self._rate:g} a second. Good: first token within "
                f"{self._goal.first_token_s:g} s, then {self._goal.between_tokens_s:g} s a token on average"
            )
        return f"{title}\n\n{table(headings, rows)}"

    def _targets(self) -> str:
        rows = []
        for target in TARGETS:
            peer = self.best_peer(target)
            ratio = self.ratio(target.workload, peer, target.ours) if peer else None
            if peer is None or ratio is None:
                continue
            met = "yes" if ratio.median >= target.factor else "no"
            rows.append([target.workload, target.ours, peer, f"{target.factor:g}", _times(ratio), met])
        if not rows:
            return ""
        headings = ["workload", "ours", "against (the best of its class)", "target", "measured", "met"]
        return f"**Targets**, times as fast\n\n{table(headings, rows)}"


def figure_of(records: Sequence[Record], value: Callable[[Record], float | None], digits: int) -> str:
    """Median of something every record may have."""
    values = [found for record in records if (found := value(record)) is not None]
    return f"{statistics.median(values):,.{digits}f}" if values else "-"


def _times(ratio: Spread | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between_markers(page: Path, text: str) -> None:
    """As `pages.write_between_markers`, with this report's markers."""
    pages.write_between_markers(page, text, BEGIN, END)


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
