"""From what lm-eval says of each arm to tables on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.lm_eval.tasks import Task

BEGIN: Final = "<!-- lm-eval:begin -->"
END: Final = "<!-- lm-eval:end -->"
TRANSFORMERS: Final = "transformers"
VTOKEN: Final = "vtoken"

Found = Mapping[str, Any]  # of a task: "metrics", "said", "seconds", as the worker writes them


@dataclass(frozen=True)
class Agreement:
    """Two arms on one task, request by request."""

    requests: int
    # With the same text drawn, or the same word on whether the text is what greedy decoding would draw. None of running
    # texts, which are scored alone.
    alike: int | None
    gap: float | None  # largest difference of two log-probabilities, in nats; None where texts are drawn

    @classmethod
    def of(cls, ours: Found, theirs: Found) -> Agreement:
        """Raises ValueError where the two were not asked the same number of things."""
        if [len(item) for item in ours["said"]] != [len(item) for item in theirs["said"]]:
            raise ValueError("the two arms were not asked the same requests")
        pairs = [
            pair
            for one, other in zip(ours["said"], theirs["said"], strict=True)
            for pair in zip(one, other, strict=True)
        ]
        gaps = [abs(_logprob(one) - _logprob(other)) for one, other in pairs if not isinstance(one, str)]
        decisions = [(_decision(one), _decision(other)) for one, other in pairs]
        is_decided = all(one is not None for one, _ in decisions)
        alike = sum(one == other for one, other in decisions) if is_decided else None
        return cls(len(pairs), alike, max(gaps, default=None))


def _logprob(said: Any) -> float:
    """Of a request's (log-probability, is it greedy); a running text has the first alone."""
    return float(said[0] if isinstance(said, list) else said)


def _decision(said: Any) -> Any:
    """What must be the same, not nearly the same."""
    if isinstance(said, list):
        return said[1]
    return said if isinstance(said, str) else None


def page(tasks: Sequence[Task], arms: Mapping[str, Mapping[str, Found]], about: Mapping[str, Any]) -> str:
    """Markdown: what was run, the metrics of all arms, and how the two full ones agree."""
    text = (
        f"`{about['command']}`, {about['date']}: {about['model']} in float32 through the Python API of "
        f"{about['lm_eval']}, by its own back end over {about['transformers']} and by vtoken, on {about['machine']}. "
        "Tasks are ours, over local files (`benchmarks/lm_eval/README.md`): "
        + "; ".join(f"{task.name}, {task.about}" for task in tasks)
        + "."
    )
    if about["left_out"]:
        text += f" Left out: {about['left_out']}."
    names = list(arms)
    metrics = [["task", "items", "metric", *names], ["---", "---:", "---", *["---:"] * len(names)]]
    for task in tasks:
        for metric in arms[TRANSFORMERS][task.name]["metrics"]:
            values = [f"{arms[name][task.name]['metrics'][metric]:.4f}" for name in names]
            metrics.append([task.name, str(len(task.docs)), metric, *values])
    agreement = [["task", "requests", "decided alike", "largest difference, nats"], ["---", "---:", "---:", "---:"]]
    for task in tasks:
        found = Agreement.of(arms[VTOKEN][task.name], arms[TRANSFORMERS][task.name])
        gap = "texts" if found.gap is None else f"{found.gap:.1g}"
        agreement.append([task.name, str(found.requests), "scores" if found.alike is None else str(found.alike), gap])
    return (
        f"{text}\n\n{_table(metrics)}\n\nThe full cache on both sides, request by request. Decided alike: the same "
        "text drawn, or the same answer to whether greedy decoding would have drawn what was scored.\n\n"
        + _table(agreement)
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
