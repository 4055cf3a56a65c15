"""`Report`: all that one benchmark found, as plain values. JSON is made of it, and so is the page.

The schema is stable: fields may be added, and `SCHEMA` changes when one changes its meaning or goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from vtoken.base.errors import ConfigError
from vtoken.bench.knee import Point
from vtoken.bench.metrics import RunMetrics

SCHEMA: Final = "vtoken.bench.reclaim/1"

# Not allowed here: no runtime could meet it in these settings. Not decided: the clock was too restless to tell.
Verdict = Literal["met", "missed", "not allowed here", "not decided", "not measured"]


@dataclass(frozen=True)
class WorkloadReport:
    name: str
    about: str
    num_jobs: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    longest: int  # tokens of the longest text


@dataclass(frozen=True)
class Cell:
    """What is the same for the arms that are compared."""

    workload: str
    policy: str
    ratio: float  # share of the text that is erased
    block_size: int
    num_blocks: int

    def __str__(self) -> str:
        return f"{self.workload}, {self.policy}, {self.ratio:.0%} erased, blocks of {self.block_size}"


@dataclass(frozen=True)
class RunReport:
    """One arm's run in one cell. The native arm evicts nothing: its run is the same for all policies and ratios."""

    cell: Cell
    arm: str
    metrics: RunMetrics
    num_spared: int  # jobs too short for the policy to take anything from
    # Answer tokens a second within the SLA: the most of a sweep where there is one, else this run's, or 0 if it breaks
    # the SLA; None without a native arm to take the SLA from.
    throughput_within: float | None = None


@dataclass(frozen=True)
class Comparison:
    """An arm against naive, over the places (request and length) at which both were short of blocks."""

    cell: Cell
    arm: str
    has_same_victims: bool
    places: int
    retained_blocks: float  # a request
    naive_retained_blocks: float
    floor_blocks: float
    reduction: float  # share of naive's blocks that this arm does without
    possible: float  # the same for an arm without a block above the floor
    ceiling: float  # 1 - p / (1 - (1 - p)^B): for scattered survivors, blocks counted in fractions


@dataclass(frozen=True)
class Sweep:
    """One arm in one cell, with at most so many requests at once."""

    cell: Cell
    arm: str
    points: list[Point]
    sustained: int  # the most at once without a preemption, found by bisection
    knee: int
    p95_limit: float  # s: 1.05 x the decode p95 of the native arm with no limit
    throughput_within: float  # the most answer tokens a second of the points that keep it


@dataclass(frozen=True)
class SteadyProbe:
    """Decoding at a fixed budget in a pool that is just large enough: reuse alone has to do."""

    policy: str
    budget: int  # tokens
    num_blocks: int
    steps: int  # in which every sequence decodes and has lost tokens since its prompt
    tokens_evicted: int  # in them
    tokens_copied: int
    bytes_copied: int


@dataclass(frozen=True)
class OverheadProbe:
    """The vtoken arm, ready to evict under pressure, in a pool that stays half empty, against the native arm."""

    policy: str
    num_blocks: int
    peak_held_blocks: int
    tokens_evicted: int
    reclaim_plans: int
    native_step_seconds: float  # median decode step, host and device
    vtoken_step_seconds: float
    overhead: float  # the median of `rounds`
    host_share: float  # of the overhead: by planning and entering results, the rest is the step's own
    # Of each round: the median, over pairs of steps that ran one after the other, of vtoken's / native's, less 1.
    rounds: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """How far the rounds lie apart."""
        return max(self.rounds) - min(self.rounds) if self.rounds else 0.0


@dataclass(frozen=True)
class Line:
    """One arm over time, thinned out."""

    arm: str
    seconds: list[float]
    held: list[int]  # blocks
    floor: list[int]
    running: list[int]


@dataclass(frozen=True)
class Picture:
    """What the plots of one cell are made of."""

    cell: Cell
    lines: list[Line]
    occupancy: dict[str, list[float]]  # arm -> share of held blocks by live tokens in them, 0 to block_size
    # One digit a cell (0 free, 1 tail, 2 dead, 3 live), one text a block; None: nothing was packed.
    slots_before: list[str] | None
    slots_after: list[str] | None
    blocks_returned: int  # by the reclaim between the two


@dataclass(frozen=True)
class TargetReport:
    """One thing that was promised."""

    name: str
    requirement: str  # id in the requirements book
    statement: str
    how: str  # it is computed
    wanted: float
    measured: float | None
    unit: str
    verdict: Verdict
    where: str  # the setting that decides
    why: str  # for what was missed or not decided, and what else has to be known; may be empty


@dataclass(frozen=True)
class Report:
    """Everything, in the order in which the page shows it."""

    vtoken: str  # version
    created: str  # ISO time
    machine: dict[str, str]
    settings: dict[str, Any]
    workloads: list[WorkloadReport]
    runs: list[RunReport]
    comparisons: list[Comparison]
    sweeps: list[Sweep] = field(default_factory=list)
    steady: SteadyProbe | None = None
    overhead: OverheadProbe | None = None
    pictures: list[Picture] = field(default_factory=list)
    targets: list[TargetReport] = field(default_factory=list)
    schema: str = SCHEMA


_ADAPTER: Final = TypeAdapter(Report)


def to_json(report: Report) -> str:
    return _ADAPTER.dump_json(report, indent=1).decode()


def from_json(text: str, name: str = "report") -> Report:
    """Raises ConfigError for what is no report of this schema."""
    try:
        report = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{name} is no report of a benchmark: {place + ': ' if place else ''}{first['msg']}"
        ) from None
    if report.schema != SCHEMA:
        raise ConfigError(f"{name} has schema {report.schema!r}, this version reads {SCHEMA!r}")
    return report
