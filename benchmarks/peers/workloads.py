"""What every engine is asked to do. Standard library only: runners import this in the environments of their engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self

# batch: all requests at once. latency: one request at a time, with the time to its first token. prefill: one prompt,
# one token. arrivals: requests come at their own times, whether the engine keeps up or not (an open loop).
Kind = Literal["batch", "latency", "prefill", "arrivals"]


@dataclass(frozen=True)
class Request:
    """A prompt of token ids and how many tokens to answer with, exactly. `arrival_s` counts from the run's start."""

    prompt: list[int]
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """`repeats` runs in one process, each of `num_requests` fresh prompts; lengths are 0 where a trace decides them."""

    name: str
    title: str
    kind: Kind
    num_requests: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class Spec:
    """All that a runner is told. Written as JSON by the driver, read by `runners.protocol`."""

    kind: Kind
    runs: list[list[Request]]
    warm_up: Request
    model: str  # the checkpoint folder
    settings: dict[str, Any]  # the engine's own, from `engines.py`
    peers_dir: str
    threads: int
    max_num_seqs: int
    max_model_len: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        runs = [[Request(**request) for request in run] for run in data["runs"]]
        return cls(**{**data, "runs": runs, "warm_up": Request(**data["warm_up"])})

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        return max(len(request.prompt) + request.output_tokens for run in self.runs for request in run)


MAX_NUM_SEQS: Final = 64
MAX_MODEL_LEN: Final = 8192  # the model's own
KV_GIB: Final = 4  # pool of the engines that want a size: W1 needs 1.1 GiB of float32, W5 at most 3

WORKLOADS: Final = {
    each.name: each
    for each in (
        Workload("W1", "64 requests of 256 + 128 tokens, all at once", "batch", 64, 256, 128),
        Workload("W2", "8 requests of 2,048 + 128 tokens, all at once", "batch", 8, 2048, 128),
        Workload("W3", "one request of 128 + 128 tokens", "latency", 1, 128, 128, repeats=3),
        Workload("W4", "prefill of 4,096 tokens", "prefill", 1, 4096, 1),
        Workload("W5", "chat requests with arrivals", "arrivals", 96),
    )
}
WARM_UP: Final = (64, 8)  # tokens of the prompt and of the answer that every process computes before it is timed

# The same shapes at a size that only shows that every cell works.
SMOKE: Final = {
    each.name: each
    for each in (
        Workload("W1", "4 requests of 32 + 8 tokens, all at once", "batch", 4, 32, 8),
        Workload("W2", "2 requests of 256 + 8 tokens, all at once", "batch", 2, 256, 8),
        Workload("W3", "one request of 32 + 16 tokens", "latency", 1, 32, 16, repeats=2),
        Workload("W4", "prefill of 512 tokens", "prefill", 1, 512, 1),
        Workload("W5", "chat requests with arrivals", "arrivals", 6),
    )
}
