"""What a recording amounts to: the figures of one run, and those that compare two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from vtoken.bench.recorder import Recording

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RunMetrics:
    """The figures of one run of one arm. Seconds are of the run's clock, `planner_*` and `apply_*` of the host's.

    *Retained blocks* and their floor are means over all tokens of all answers: each counts once, when it is computed.
    """

    # What was done.
    steps: int
    seconds: float
    tokens_generated: int
    tokens_computed: int
    throughput: float  # answer tokens a second
    # How long an answer's tokens took.
    decode_p50: float  # s of a step in which every sequence decodes
    decode_p95: float
    token_gap_p50: float  # s from one token of an answer to the next: others' prompts and preemptions are in it
    token_gap_p95: float
    first_token_p50: float  # s from a request's arrival to its first token
    first_token_p95: float
    # Memory.
    tokens_erased: int
    partly_used_share: float  # of the held blocks, mean over the steps
    retained_blocks: float  # a request
    floor_blocks: float
    retained_over_floor: float  # how much more, as a share of the floor
    blocks_over_floor: int  # the most that one sequence held too many where reclaim had given all it could
    beyond_floor_share: float  # of those (sequence, step) pairs: more than 2 % and more than one block too many
    drained_samples: int  # such pairs
    unused_blocks: float  # of those a sequence holds in them: never used, for tokens to come; mean
    peak_held_blocks: int
    holes_share: float  # of the held cells, mean over the steps
    tail_share: float
    # Reclaim.
    blocks_returned: int
    blocks_returned_dead: int  # of those: nothing lived there any more
    tokens_copied: int
    bytes_copied: int
    reclaim_plans: int
    copy_wait_seconds: float
    copy_wait_share: float  # of the run's seconds
    # Concurrency.
    mean_running: float
    peak_running: int
    unpreempted_running: int  # most at once before the first preemption
    preemptions: int
    # The host.
    planner_seconds: float
    planner_p50: float
    planner_p95: float
    apply_p50: float
    rungs: Mapping[str, int]  # of the pressure ladder, how often each was climbed
    verdicts: Mapping[str, int]  # of the decision log
    victims: str  # hash of who died where and when


@dataclass(frozen=True)
class Totals:
    """What the engine's own counters say at the end of a run."""

    tokens_generated: int
    tokens_computed: int
    tokens_erased: int
    blocks_returned: int
    blocks_returned_dead: int
    tokens_copied: int
    reclaim_plans: int
    preemptions: int
    rungs: Mapping[str, int]
    verdicts: Mapping[str, int]
    victims: str


def summarize(recording: Recording, totals: Totals, bytes_per_token: int, warm_up: float = 0.0) -> RunMetrics:
    """The figures of a finished run; `warm_up` is the share of the answer tokens that the throughput leaves out."""
    steps, samples, size = recording.steps, recording.samples, recording.block_size
    seconds = float(steps["time"][-1]) if len(steps) else 0.0
    decodes = steps["taken"][steps["is_decode"]]
    cells = np.maximum(steps["held"] * size, 1)
    floors = recording.floors
    drained = samples["is_drained"]
    over = (samples["held"] - floors)[drained]
    beyond = over > np.maximum(1, 0.02 * floors[drained])
    retained, floor = mean(samples["held"]), mean(floors)
    return RunMetrics(
        steps=len(steps),
        seconds=seconds,
        tokens_generated=totals.tokens_generated,
        tokens_computed=totals.tokens_computed,
        throughput=throughput(recording, warm_up),
        decode_p50=percentile(decodes, 50),
        decode_p95=percentile(decodes, 95),
        token_gap_p50=percentile(recording.token_gaps, 50),
        token_gap_p95=percentile(recording.token_gaps, 95),
        first_token_p50=percentile(recording.first_token_seconds, 50),
        first_token_p95=percentile(recording.first_token_seconds, 95),
        tokens_erased=totals.tokens_erased,
        partly_used_share=mean(steps["partly"] / np.maximum(steps["held"], 1)),
        retained_blocks=retained,
        floor_blocks=floor,
        retained_over_floor=retained / floor - 1 if floor else 0.0,
        blocks_over_floor=int(over.max(initial=0)),
        beyond_floor_share=mean(beyond),
        drained_samples=int(drained.sum()),
        unused_blocks=mean(samples["unused"][drained]),
        peak_held_blocks=int(steps["held"].max(initial=0)),
        holes_share=mean(steps["holes"] / cells),
        tail_share=mean(steps["tail"] / cells),
        blocks_returned=totals.blocks_returned,
        blocks_returned_dead=totals.blocks_returned_dead,
        tokens_copied=totals.tokens_copied,
        bytes_copied=totals.tokens_copied * bytes_per_token,
        reclaim_plans=totals.reclaim_plans,
        copy_wait_seconds=float(steps["copies"].sum()),
        copy_wait_share=float(steps["copies"].sum()) / seconds if seconds else 0.0,
        mean_running=mean(steps["running"]),
        peak_running=recording.peak_running,
        unpreempted_running=recording.unpreempted_running,
        preemptions=totals.preemptions,
        planner_seconds=float(steps["planning"].sum()),
        planner_p50=percentile(steps["planning"], 50),
        planner_p95=percentile(steps["planning"], 95),
        apply_p50=percentile(steps["applying"], 50),
        rungs=dict(totals.rungs),
        verdicts=dict(totals.verdicts),
        victims=totals.victims,
    )


def throughput(recording: Recording, warm_up: float) -> float:
    """Answer tokens a second, from the step on that drew the first ones behind the warm-up; 0 of an empty run."""
    drawn = np.cumsum(recording.steps["drawn"])
    if not len(drawn):
        return 0.0
    first = int(np.searchsorted(drawn, warm_up * drawn[-1], side="right")) if warm_up else 0
    before = (0, 0.0) if first == 0 else (int(drawn[first - 1]), float(recording.steps["time"][first - 1]))
    seconds = float(recording.steps["time"][-1]) - before[1]
    return (int(drawn[-1]) - before[0]) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Reduction:
    """How many blocks fewer one arm retained than another, with the same victims.

    Over the places (request and length of its text) at which, in both arms, somebody was waiting for blocks: elsewhere
    nothing needs to be given back.
    """

    places: int
    retained: float  # blocks a request, mean over the places
    other_retained: float
    floor: float
    ceiling: float  # the share that could be saved if survivors lay scattered, see `scattered_ceiling`

    @property
    def share(self) -> float:
        """Of the other arm's blocks, the share that this one does without."""
        return 1 - self.retained / self.other_retained if self.other_retained else 0.0

    @property
    def possible(self) -> float:
        """The same for an arm that holds no block above the floor."""
        return 1 - self.floor / self.other_retained if self.other_retained else 0.0


def reduction(recording: Recording, other: Recording) -> Reduction:
    """Compare two arms at the places where both were short of blocks; at all common places if there are none."""
    assert recording.block_size == other.block_size, "arms are compared at the same block size"
    ours, theirs = recording.samples, other.samples
    for is_needed in (True, False):
        mine, yours = (part[part["is_short"]] if is_needed else part for part in (ours, theirs))
        _, i, j = np.intersect1d(_places(mine), _places(yours), return_indices=True)
        if len(i):
            break
    live, lengths, size = mine["live"][i], mine["length"][i], recording.block_size
    return Reduction(
        places=len(i),
        retained=mean(mine["held"][i]),
        other_retained=mean(yours["held"][j]),
        floor=mean(-(-live // size)),
        ceiling=scattered_ceiling(live, lengths, size),
    )


def scattered_ceiling(live: NDArray[np.int64], lengths: NDArray[np.int64], block_size: int) -> float:
    """The most that packing can save where each token survived with the same chance, wherever it stands.

    Of a text of `n` tokens a share `p` lives. A block of B keeps a survivor with probability 1 - (1 - p)^B, so without
    packing n / B (1 - (1 - p)^B) blocks stay, and n p / B are enough: 1 - p / (1 - (1 - p)^B). `live` and `lengths` are
    [n] and the sums are taken first, as means over requests are compared.
    """
    if not len(live):
        return 0.0
    p = live / lengths
    kept = lengths / block_size * (1 - (1 - p) ** block_size)
    return float(1 - (live / block_size).sum() / kept.sum())


def victim_hash(deaths: Mapping[int, Mapping[int, int]]) -> str:
    """Of request -> position -> length of the text at which the token died; the same for the same victims."""
    digest = blake2b(digest_size=8)
    for request, died_at in sorted(deaths.items()):
        pairs = np.array([request, len(died_at), *(n for pair in sorted(died_at.items()) for n in pair)], "<i8")
        digest.update(pairs.tobytes())
    return digest.hexdigest()


def mean(values: NDArray[np.generic]) -> float:
    """0 of nothing."""
    return float(np.mean(values.astype(np.float64))) if len(values) else 0.0


def percentile(values: Floats, percent: float) -> float:
    """0 of nothing."""
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _places(samples: NDArray[np.void]) -> NDArray[np.int64]:
    places: NDArray[np.int64] = samples["request"] << 32 | samples["length"]
    return places
