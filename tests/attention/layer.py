"""One attention layer over a paged cache, driven as a scheduler would, every freedom of layout in the test's hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.plans import Lane, Slice, make_plan
from tests.plans import order as make_order
from vtoken.attention.base import AttentionBackend
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.reference import ReferenceAttention
from vtoken.attention.spec import AttentionSpec
from vtoken.planner.kv_memory import KVShape
from vtoken.policies.statistics import AttentionStatistic, Statistic, Sum
from vtoken.schedule.plan import StatisticOrder
from vtoken.worker.kv_store import KVStore

PLAIN = AttentionSpec(scale=0.25)
SUM = Sum()


@dataclass
class Text:
    """What one layer computes for one sequence: random queries, keys and values for every position."""

    q: Tensor  # [T, num_heads, head_dim]
    k: Tensor  # [T, num_kv_heads, head_dim]
    v: Tensor  # [T, num_kv_heads, head_dim]
    # Once the first `n` tokens are computed, these positions die: fixed places, as eviction by stride has them.
    deaths: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        num_tokens: int,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        seed: int = 0,
        deaths: Mapping[int, Sequence[int]] | None = None,
        spread: float = 2.0,
    ) -> Text:
        generator = torch.Generator().manual_seed(seed)

        def noise(heads: int) -> Tensor:
            return torch.randn(num_tokens, heads, head_dim, generator=generator)

        return cls(spread * noise(num_heads), noise(num_kv_heads), noise(num_kv_heads), deaths or {})

    def __len__(self) -> int:
        return len(self.q)

    def alive_at(self, position: int) -> list[int]:
        """Positions that the query at `position` may see, windows aside."""
        dead = {p for n, positions in self.deaths.items() if n <= position for p in positions}
        return [p for p in range(position + 1) if p not in dead]


class Layer:
    """A KV store of one layer in which cells hold NaN until they are written, and again after their token died."""

    def __init__(
        self,
        text: Text,
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        spec: AttentionSpec = PLAIN,
        dtype: torch.dtype = torch.float32,
        kv: tuple[str, str] | None = None,
        backend: AttentionBackend | None = None,
        seed: int = 0,
    ) -> None:
        """`dtype` is that of the model, and of the cache where `kv` does not name formats of keys and values."""
        _, num_kv_heads, head_dim = text.k.shape
        self.spec = spec
        self.dtype = dtype
        keys, values = kv or 2 * (str(dtype).removeprefix("torch."),)
        self.store = KVStore(KVShape(1, num_kv_heads, head_dim, keys, values), num_blocks, block_size)
        poison(self.store)
        self.backend = backend or ReferenceAttention()
        self.rng = np.random.default_rng(seed)
        self.free_blocks = [int(b) for b in self.rng.permutation(num_blocks)]

    def step(
        self, parts: Sequence[tuple[Slice, Text]], statistics: Sequence[Statistic | StatisticOrder] = ()
    ) -> tuple[list[Tensor], AttentionMetadata]:
        """Outputs [T, num_heads, head_dim] of each slice, computed in one plan."""
        plan = make_plan([part for part, _ in parts], statistics=statistics)
        meta = AttentionMetadata.from_plan(plan)
        q, k, v = (
            torch.cat([getattr(text, name)[part.positions] for part, text in parts]).to(self.dtype) for name in "qkv"
        )
        cache, slots = self.store.layers[0], torch.from_numpy(plan.write_slots)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        out = self.backend.attend(self.spec, *self.backend.write(qkv, None, cache, slots), cache, meta)
        for part, _ in parts:
            part.commit()
        return list(out.split([len(part.token_ids) for part, _ in parts])), meta

    def extend(self, lane: Lane, num_tokens: int, scatter: bool) -> list[int]:
        """Rows for new tokens: free cells, in any order when scattered, and new blocks when they do not suffice."""
        size = lane.block_size
        while True:
            free = [row for row in range(len(lane.block_table) * size) if row not in lane.past]
            if len(free) >= num_tokens:
                break
            lane.block_table.append(self.free_blocks.pop())
        return [int(row) for row in (self.rng.permutation(free) if scatter else free)[:num_tokens]]

    def kill(self, lane: Lane, positions: Sequence[int]) -> None:
        """Positions die; what lay in their cells is poison from now on."""
        row_of = {position: row for row, position in lane.past.items()}
        rows = [row_of[position] for position in positions]
        poison(self.store, lane.slots(rows))
        for row in rows:
            del lane.past[row]


def poison(store: KVStore, slots: NDArray[np.int64] | None = None) -> None:
    """Fill these slots, or all, with what shows wherever it is read: NaN, or the largest code at a scale of NaN."""
    slots = np.arange(store.num_blocks * store.block_size) if slots is None else slots
    blocks, offsets = (torch.from_numpy(part) for part in np.divmod(slots, store.block_size))
    for tensor in store.tensors:
        tensor[blocks, :, offsets] = torch.nan if tensor.is_floating_point() else 127


def run(
    text: Text,
    *,
    cuts: Sequence[int] = (),
    block_size: int = 16,
    spec: AttentionSpec = PLAIN,
    scatter: bool = False,
    neighbours: int = 0,
    dtype: torch.dtype = torch.float32,
    kv: tuple[str, str] | None = None,
    backend: AttentionBackend | None = None,
    seed: int = 0,
    statistic: AttentionStatistic = SUM,
    first: int = 0,
) -> tuple[Tensor, np.ndarray]:
    """Compute a text in chunks that end at `cuts` (and wherever tokens die).

    Returns the outputs [T, num_heads, head_dim] and the statistic of each position [T] while it lived, over the queries
    at positions from `first` on; the attention it drew unless told otherwise.
    """
    layer = Layer(
        text,
        block_size=block_size,
        num_blocks=2048 // block_size * 2,
        spec=spec,
        dtype=dtype,
        kv=kv,
        backend=backend,
        seed=seed,
    )
    lane, outputs, drawn = Lane(block_size, []), [], np.zeros(len(text))
    others = [(Lane(block_size, []), Text.random(256, *_shape(text), seed=900 + i)) for i in range(neighbours)]
    ends = sorted({*cuts, *text.deaths, len(text)} - {0})
    for begin, end in zip([0, *ends], ends, strict=False):
        parts = [(Slice(lane, [0] * (end - begin), begin, layer.extend(lane, end - begin, scatter)), text)]
        for other, content in others:
            num_tokens = min(int(layer.rng.integers(1, 20)), len(content) - other.next_position)
            if num_tokens:
                rows = layer.extend(other, num_tokens, scatter)
                parts.append((Slice(other, [0] * num_tokens, other.next_position, rows), content))
        order = layer.rng.permutation(len(parts))
        mine = order.tolist().index(0)
        wanted = make_order(statistic, [mine], first)
        results, meta = layer.step([parts[i] for i in order], [wanted])
        outputs.append(results[mine])
        for row, position in lane.past.items():
            drawn[position] += meta.gathered(wanted)[0, row]
        layer.kill(lane, text.deaths.get(end, ()))
    return torch.cat(outputs), drawn


def _shape(text: Text) -> tuple[int, int, int]:
    return text.q.shape[1], text.k.shape[1], text.q.shape[2]


def dense(text: Text, spec: AttentionSpec, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's oracle: float64 softmax over the visible tokens, one query and one head after the other."""
    out, drawn = np.zeros(text.q.shape), np.zeros(len(text))
    for position, head, seen, weights in _each_query(text, spec):
        values = text.v[seen, head // (text.q.shape[1] // text.v.shape[1])].double().numpy()
        out[position, head] = weights @ values
        drawn[seen] += weights * (position >= first)
    return out, drawn


def dense_low(text: Text, spec: AttentionSpec, first: int = 0, slack: float = 0.0) -> np.ndarray:
    """[T] how often a token drew less than its share, times `1 + slack`, of a query at `first` or later."""
    counts = np.zeros(len(text))
    for position, _, seen, weights in _each_query(text, spec):
        counts[seen] += (weights < (1 + slack) / len(seen)) & (position >= first)
    return counts


def _each_query(text: Text, spec: AttentionSpec) -> Iterator[tuple[int, int, list[int], np.ndarray]]:
    """(position, query head, positions it sees, the probability of each)."""
    q, k = text.q.double().numpy(), text.k.double().numpy()
    group = q.shape[1] // k.shape[1]
    for position in range(len(text)):
        seen = [p for p in text.alive_at(position) if spec.window is None or p > position - spec.window]
        for head in range(q.shape[1]):
            scores = spec.scale * k[seen, head // group] @ q[position, head]
            if spec.soft_cap is not None:
                scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
            weights = np.exp(scores - scores.max())
            yield position, head, seen, weights / weights.sum()
