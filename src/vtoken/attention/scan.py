"""Read `CacheStatistic`s off the cache when a step has been computed.

The past of a slice and its own new tokens are taken in order of position, and sums run in that order on one thread. So
a value depends on the tokens that live, not on where they lie, how the text was cut into chunks or who else runs: bit
for bit where attention itself is (`reference`), within the rounding of the keys elsewhere. Memory is bounded by one
layer of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.attention.cache import LayerCache
from vtoken.attention.cache_statistics import READERS, FutureQueries, LayerView, read
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.spec import AttentionSpec
from vtoken.attention.threads import one_thread
from vtoken.policies.statistics import CacheStatistic, FutureAttention, Statistic
from vtoken.schedule.plan import StatisticOrder

CACHE_STATISTICS: Final[frozenset[type[Statistic]]] = frozenset(READERS)
"""What can be read from any cache, whichever backend fills it."""

PIECE_TOKENS: Final = 4096  # tokens of which a fixed statistic is read at once, whosever they are


def needs_positions(statistic: Statistic) -> bool:
    """Whether a plan that orders it must bring `row_positions` where rows are not in order of position: to take tokens
    in the order of the text, or to tell which of them are asked for."""
    return isinstance(statistic, CacheStatistic)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Live tokens after the step, in order of position within a slice."""

    lines: NDArray[np.int64]  # [N] which entry of the order they belong to
    rows: NDArray[np.int64]  # [N]
    positions: NDArray[np.int64]  # [N]
    slots: NDArray[np.int64]  # [N]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice | NDArray[np.bool_]) -> _Tokens:
        return _Tokens(self.lines[which], self.rows[which], self.positions[which], self.slots[which])

    @classmethod
    def join(cls, parts: Sequence[_Tokens]) -> _Tokens:
        names = ("lines", "rows", "positions", "slots")
        none = [np.zeros(0, np.int64)]
        return cls(*(np.concatenate(none + [getattr(part, name) for part in parts]) for name in names))


class CacheScan:
    """The cache as one plan has left it.

    `future(statistic, s)` gives what FutureAttention needs to know of slice `s`.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        specs: Sequence[AttentionSpec],
        meta: AttentionMetadata,
        write_slots: NDArray[np.int64],  # [T]
        future: Callable[[FutureAttention, int], FutureQueries],
    ) -> None:
        self._layers = layers
        self._specs = specs
        self._meta = meta
        self._write_slots = write_slots
        self._future = future
        self._known: dict[int, _Tokens] = {}  # by slice, as several orders may name the same

    def read(self, order: StatisticOrder) -> NDArray[np.float64]:
        """[n, rows] by row of each slice's lane; NaN where no value was asked for."""
        result = np.full((len(order), self._meta.num_rows), np.nan)
        statistic = order.statistic
        assert isinstance(statistic, CacheStatistic)
        with one_thread():
            for tokens, future in self._parts(order, statistic):
                values = self._values(statistic, tokens, future)
                result[tokens.lines, tokens.rows] = values.numpy()
        return result

    def _parts(
        self, order: StatisticOrder, statistic: CacheStatistic
    ) -> Iterable[tuple[_Tokens, FutureQueries | None]]:
        """What to read at once: a sequence, or where tokens do not depend on each other, as many as fit."""
        slices = order.slices.tolist()
        if statistic.is_fixed:
            firsts = order.first.tolist()
            everyone = [self._from(s, first) for s, first in zip(slices, firsts, strict=True)]
            tokens = _Tokens.join([_of_line(part, line) for line, part in enumerate(everyone)])
            for begin in range(0, len(tokens), PIECE_TOKENS):
                yield tokens[begin : begin + PIECE_TOKENS], None
            return
        for line, s in enumerate(slices):
            if order.due is not None and not order.due[line]:
                continue
            future = self._future(statistic, s) if isinstance(statistic, FutureAttention) else None
            yield _of_line(self._live(s), line), future

    def _values(self, statistic: CacheStatistic, tokens: _Tokens, future: FutureQueries | None) -> Tensor:
        """[N] float64, the mean over layers."""
        total = torch.zeros(len(tokens), dtype=torch.float64)
        slots, positions = torch.from_numpy(tokens.slots), torch.from_numpy(tokens.positions)
        plane = self._layers[0].keys
        block_size = plane.cells.shape[2]
        cells = plane.cells_of(slots // block_size, slots % block_size).T.contiguous()  # [num_kv_heads, N]
        for layer, (cache, spec) in enumerate(zip(self._layers, self._specs, strict=True)):
            read_keys, read_values = (partial(plane.read_cells, cells) for plane in (cache.keys, cache.values))
            total += read(LayerView(layer, spec, positions, read_keys, read_values, future), statistic)
        return total / len(self._layers)

    def _from(self, s: int, first: int) -> _Tokens:
        """Live tokens of a slice at positions from `first` on."""
        own = self._own(s)
        if first >= own.positions[0]:  # the usual case, and the cheap one: the past is known already
            return own[own.positions >= first]
        tokens = self._live(s)
        return tokens[tokens.positions >= first]

    def _live(self, s: int) -> _Tokens:
        if s not in self._known:
            past = self._meta.past(s)
            rows = _Tokens(np.zeros_like(past.rows), past.rows, past.positions, past.slots.numpy())
            self._known[s] = _Tokens.join([rows, self._own(s)])
        return self._known[s]

    def _own(self, s: int) -> _Tokens:
        own = slice(self._meta.starts[s], self._meta.starts[s + 1])
        rows = self._meta.write_rows[own].astype(np.int64)
        return _Tokens(np.zeros_like(rows), rows, self._meta.positions[own], self._write_slots[own])


def _of_line(tokens: _Tokens, line: int) -> _Tokens:
    return _Tokens(np.full_like(tokens.rows, line), tokens.rows, tokens.positions, tokens.slots)
