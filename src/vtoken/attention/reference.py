"""Reference attention: plain torch, the oracle that the fast backends are held to.

Its promise: a query's output is a function of the keys and values it may see and of nothing else, bit for bit. The
place of tokens in memory, the block size, the cut of chunks and the other sequences cannot change it. A matrix product
gives an element other bits when the shape of the product changes, or (on AVX2) when its row moves, so:

- one sequence at a time; its visible tokens are gathered in order of position;
- queries are computed in tiles of `QUERY_TILE` rows, the query of position `p` always in row `p % QUERY_TILE`;
- keys are computed in tiles of `KEY_TILE` visible tokens, zeros behind the last;
- every product, exponential and row sum has the same shape in every call, over fresh and hence equally aligned memory;
- tiles are added up one after the other from the first, so that a tile in which nothing is visible adds exact zeros.

What is left (maxima, comparisons, single additions and multiplications) is exact or correctly rounded in any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.attention.base import AttentionBackend
from vtoken.attention.cache import CachePlane, LayerCache
from vtoken.attention.metadata import MASS_UNIT, AttentionMetadata, Past, Tally
from vtoken.attention.scan import CACHE_STATISTICS
from vtoken.attention.spec import AttentionSpec
from vtoken.attention.threads import one_thread
from vtoken.policies.statistics import CountLow, Statistic, Sum, SumLast

QUERY_TILE = 16
KEY_TILE = 128

_NOWHERE = np.iinfo(np.int64).max  # position of a padding key: after every query, so never visible


class ReferenceAttention(AttentionBackend):
    """Attention in float32 over gathered tokens. Any head count, head width, block size and KV format; CPU."""

    statistics: ClassVar[frozenset[type[Statistic]]] = CACHE_STATISTICS | {Sum, SumLast, CountLow}
    compiled: ClassVar[bool] = False
    needs_row_positions: ClassVar[bool] = True

    def attend(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: LayerCache,
        meta: AttentionMetadata,
    ) -> Tensor:
        out = torch.empty_like(q)
        with one_thread():
            for s, past in enumerate(meta.pasts):
                own = slice(meta.starts[s], meta.starts[s + 1])
                keys = _tiles(_gather(cache.keys, past), k_new[own])
                values = _tiles(_gather(cache.values, past), v_new[own])
                self.slots_read += len(past.slots)
                key_positions = _padded(past.positions, meta.positions[own], keys.shape[0] * KEY_TILE)
                rows = np.concatenate([past.rows, meta.write_rows[own]])
                _attend_slice(
                    spec,
                    q[own],
                    keys,
                    values,
                    query_positions=meta.positions[own],
                    key_positions=key_positions,
                    out=out[own],
                    tallies=[_SliceTally(tally, s, rows) for tally in meta.tallies],
                )
        return out


class _SliceTally:
    """A tally as the tiles of one slice add to it."""

    def __init__(self, tally: Tally, s: int, rows: NDArray[np.int64]) -> None:
        self.first = int(tally.first[s])  # position of the first query that counts
        self._counts_low = tally.counts_low
        self._values = tally.values[s]
        self._rows = rows  # [K] of the slice's keys, in their order

    def add(self, weights: Tensor, visible: Tensor) -> None:
        """Probabilities [num_tiles, num_heads, Q, KEY_TILE] of the queries that count, and which keys each of them sees
        [Q, num_tiles * KEY_TILE]."""
        if self._counts_low:
            seen = visible.view(len(visible), -1, KEY_TILE).transpose(0, 1)[:, None]  # [num_tiles, 1, Q, KEY_TILE]
            share = 1.0 / visible.sum(dim=1).double()[:, None]
            drawn = ((weights < share) & seen).sum(dim=(1, 2)).double()
        else:
            drawn = (weights / MASS_UNIT).round_().sum(dim=(1, 2)) * MASS_UNIT
        self._values[self._rows] += drawn.flatten()[: len(self._rows)].numpy()


def _gather(plane: CachePlane, past: Past) -> Tensor:
    """float32 [P, num_kv_heads, head_dim]: the live past, and not one slot more."""
    block_size = plane.cells.shape[2]
    return plane.read(past.slots // block_size, past.slots % block_size)


def _tiles(past: Tensor, own: Tensor) -> Tensor:
    """[num_tiles, num_kv_heads, KEY_TILE, head_dim] float32: past and own tokens in order, zeros behind them."""
    num_past, num_own = len(past), len(own)
    num_tiles = -(-(num_past + num_own) // KEY_TILE)
    _, num_kv_heads, head_dim = own.shape
    flat = torch.zeros(num_tiles * KEY_TILE, num_kv_heads, head_dim, dtype=torch.float32)
    flat[:num_past] = past
    flat[num_past : num_past + num_own] = own
    return flat.view(num_tiles, KEY_TILE, num_kv_heads, head_dim).transpose(1, 2).contiguous()


def _padded(past: NDArray[np.int64], own: NDArray[np.int64], length: int) -> Tensor:
    """[length] positions of the keys in their tiles."""
    assert not len(past) or past[-1] < own[0], "a slice's own tokens come after its past"
    positions = np.full(length, _NOWHERE)
    positions[: len(past)] = past
    positions[len(past) : len(past) + len(own)] = own
    return torch.from_numpy(positions)


def _attend_slice(
    spec: AttentionSpec,
    q: Tensor,  # [T, num_heads, head_dim]
    keys: Tensor,  # [num_tiles, num_kv_heads, KEY_TILE, head_dim]
    values: Tensor,  # [num_tiles, num_kv_heads, KEY_TILE, head_dim]
    query_positions: NDArray[np.int64],  # [T] consecutive
    key_positions: Tensor,  # [num_tiles * KEY_TILE]
    out: Tensor,  # [T, num_heads, head_dim]
    tallies: Sequence[_SliceTally],
) -> None:
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    first = int(query_positions[0])
    assert int(query_positions[-1]) == first + num_queries - 1, "the tokens of a slice are consecutive"

    for tile_start in range(first - first % QUERY_TILE, first + num_queries, QUERY_TILE):
        begin, end = max(tile_start, first), min(tile_start + QUERY_TILE, first + num_queries)
        in_tile, in_slice = slice(begin - tile_start, end - tile_start), slice(begin - first, end - first)
        tile = torch.zeros(num_kv_heads, group, QUERY_TILE, head_dim, dtype=torch.float32)
        tile[:, :, in_tile] = q[in_slice].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)

        # Rows of the tile without a query are computed like the others and dropped.
        positions = torch.arange(tile_start, tile_start + QUERY_TILE)[:, None]
        visible = key_positions <= positions  # [QUERY_TILE, num_tiles * KEY_TILE]
        if spec.window is not None:
            visible &= key_positions > positions - spec.window
        wanting = [tally for tally in tallies if tally.first < end]
        result, weights = _attend_tile(spec, tile.flatten(1, 2), keys, values, visible, want_weights=bool(wanting))
        result = result.view(num_kv_heads, group, QUERY_TILE, head_dim)[:, :, in_tile]
        out[in_slice] = result.permute(2, 0, 1, 3).flatten(1, 2)
        by_query = weights.view(-1, num_heads, QUERY_TILE, KEY_TILE) if wanting else weights
        for tally in wanting:
            counted = slice(max(begin, tally.first) - tile_start, in_tile.stop)
            tally.add(by_query[:, :, counted], visible[counted])


def _attend_tile(
    spec: AttentionSpec,
    q: Tensor,  # [num_kv_heads, group * QUERY_TILE, head_dim]
    keys: Tensor,  # [num_tiles, num_kv_heads, KEY_TILE, head_dim]
    values: Tensor,  # [num_tiles, num_kv_heads, KEY_TILE, head_dim]
    visible: Tensor,  # [QUERY_TILE, num_tiles * KEY_TILE]
    want_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Output [num_kv_heads, group * QUERY_TILE, head_dim] and, when wanted, the float64 probabilities
    [num_tiles, num_kv_heads, group * QUERY_TILE, KEY_TILE]."""
    num_kv_heads, num_rows, head_dim = q.shape
    seen = visible.view(QUERY_TILE, -1, KEY_TILE)
    # Tiles that no query of this tile sees are left out: they would add zeros.
    tiles = torch.nonzero(seen.any(dim=2).any(dim=0)).flatten().tolist()
    scores = torch.empty(len(tiles), num_kv_heads, num_rows, KEY_TILE, dtype=torch.float32)
    for score, t in zip(scores, tiles, strict=True):
        torch.bmm(q, keys[t].transpose(1, 2), out=score)
        score.mul_(spec.scale)
        if spec.soft_cap is not None:
            score.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    hidden = ~seen[:, tiles].transpose(0, 1)  # [tiles, QUERY_TILE, KEY_TILE]
    by_query = scores.view(len(tiles), -1, QUERY_TILE, KEY_TILE)
    by_query.masked_fill_(hidden[:, None], -torch.inf)
    # A row without a query may see nothing; it must not turn into -inf - -inf.
    peak = scores.amax(dim=(0, 3)).clamp_(min=torch.finfo(torch.float32).min)  # [num_kv_heads, rows]
    scores.sub_(peak[:, :, None])

    total = torch.zeros(num_kv_heads, num_rows, dtype=torch.float64)
    result = torch.zeros(num_kv_heads, num_rows, head_dim, dtype=torch.float64)
    for score, t in zip(scores, tiles, strict=True):
        weight = torch.exp(score, out=score)
        total += weight.sum(dim=2)
        result += torch.bmm(weight, values[t])
    weights = torch.zeros(0)
    if want_weights:
        weights = torch.zeros(len(keys), num_kv_heads, num_rows, KEY_TILE, dtype=torch.float64)
        weights[tiles] = scores.double() / total[:, :, None]
    return (result / total[:, :, None]).to(torch.float32), weights
