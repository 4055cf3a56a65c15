"""Statistics read off the cache: right against plain loops, and the same bits however the tokens are laid out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.attention.layer import poison
from tests.plans import Lane, Slice, make_plan, order
from tests.strategies import block_sizes
from vtoken.attention import cache_statistics, scan
from vtoken.attention.cache_statistics import FutureQueries
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.rotation import Rotation
from vtoken.attention.scan import CACHE_STATISTICS, CacheScan, needs_positions
from vtoken.attention.spec import AttentionSpec
from vtoken.base.kv_format import KV_FORMATS
from vtoken.planner.kv_memory import KVShape
from vtoken.policies.statistics import (
    CacheStatistic,
    FutureAttention,
    KeyNorm,
    KeyRedundancy,
    KeySimilarity,
    LagDeviation,
    Sum,
    ValueNorm,
)
from vtoken.worker.kv_store import KVStore

Floats = NDArray[np.float64]
NUM_BLOCKS = 160
STATISTICS: list[CacheStatistic] = [
    KeyNorm(),
    ValueNorm(),
    KeySimilarity(),
    KeyRedundancy(0.4),
    LagDeviation(lag=7, sinks=3),
    FutureAttention(horizon=20, window=12),
]
by_name = pytest.mark.parametrize("statistic", STATISTICS, ids=lambda statistic: type(statistic).__name__)


@dataclass
class Text:
    """Keys and values of every layer at every position, and the last queries before they are turned."""

    keys: Tensor  # [num_layers, T, num_kv_heads, head_dim]
    values: Tensor
    queries: Tensor  # [num_layers, w, num_heads, head_dim]
    dead: Sequence[int] = ()
    specs: list[AttentionSpec] = field(default_factory=list)

    @classmethod
    def random(
        cls,
        num_tokens: int,
        dead: Iterable[int] = (),
        *,
        heads: tuple[int, int, int] = (4, 2, 16),
        num_layers: int = 2,
        window: int | None = None,
        seed: int = 0,
    ) -> Text:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads, head_dim = heads

        def noise(*shape: int) -> Tensor:
            return torch.randn(num_layers, *shape, head_dim, generator=generator)

        # Keys have much in common, as those of real models, so that some of them are similar.
        keys = noise(num_tokens, num_kv_heads) + 0.8 * noise(1, num_kv_heads)
        specs = [
            AttentionSpec(scale=head_dim**-0.5, window=None if i else window, rotation=(0, 1, None)[i % 3])
            for i in range(num_layers)
        ]
        return cls(keys, noise(num_tokens, num_kv_heads), noise(12, num_heads) + 0.5, sorted(dead), specs)

    def __len__(self) -> int:
        return self.keys.shape[1]

    @property
    def live(self) -> list[int]:
        return [p for p in range(len(self)) if p not in self.dead]

    def future(self) -> FutureQueries:
        """Of queries that come next."""
        width = self.keys.shape[3] // 2 // 2 * 2  # not all elements turn
        positions = torch.arange(len(self), len(self) + 20)[:, None]
        angles = [positions * base ** torch.arange(width // 2) for base in (0.7, 0.4)]
        turns = [Rotation(angle.cos(), angle.sin()) for angle in angles]
        return FutureQueries(lambda layer: self.queries[layer], turns, len(self))


def read(
    texts: Sequence[Text],
    statistic: CacheStatistic,
    *,
    num_new: int = 1,
    block_size: int = 16,
    scatter: bool = False,
    seed: int = 0,
    kv: tuple[str, str] = ("float32", "float32"),
    **wish: object,
) -> list[Floats]:
    """The statistic of each text [T], NaN at positions that have none, when the last `num_new` tokens of each have just
    been written."""
    rng = np.random.default_rng(seed)
    free = [int(block) for block in rng.permutation(NUM_BLOCKS)]
    num_layers, _, num_kv_heads, head_dim = texts[0].keys.shape
    store = KVStore(KVShape(num_layers, num_kv_heads, head_dim, *kv), NUM_BLOCKS, block_size)
    poison(store)
    slices = []
    for text in texts:
        assert text.live[-1] == len(text) - 1, "the new tokens live"
        table = [free.pop() for _ in range(-(-len(text) // block_size))]
        cells = range(len(table) * block_size)
        rows = [int(row) for row in (rng.permutation(cells) if scatter else cells)[: len(text)]]
        begin = len(text) - num_new
        past = {rows[p]: p for p in text.live if p < begin}
        lane = Lane(block_size, table, past)
        slices.append(Slice(lane, [0] * num_new, begin, rows[begin:]))
        slots = torch.from_numpy(lane.slots([rows[p] for p in text.live]))
        for layer, cache in enumerate(store.layers):
            for plane, x in ((cache.keys, text.keys), (cache.values, text.values)):
                plane.write(x[layer, text.live], slots // block_size, slots % block_size)
    wanted = order(statistic, range(len(texts)), **wish)
    plan = make_plan(slices, statistics=[wanted])
    meta = AttentionMetadata.from_plan(plan)
    futures = [text.future() for text in texts]
    scanning = CacheScan(store.layers, texts[0].specs, meta, plan.write_slots, lambda _, s: futures[s])
    found = scanning.read(wanted)
    assert found.dtype == np.float64
    result = []
    for line, (text, part) in enumerate(zip(texts, slices, strict=True)):
        part.commit()
        of = np.full(len(text), np.nan)
        for row, position in part.lane.past.items():
            of[position] = found[line, row]
        unused = np.ones(found.shape[1], bool)
        unused[list(part.lane.past)] = False
        assert np.isnan(found[line, unused]).all()
        result.append(of)
    return result


def each_head(text: Text) -> list[tuple[Floats, Floats]]:
    """Keys and values [N, head_dim] of the live tokens, of each layer and KV head."""
    keys, values = (x[:, text.live].double().numpy() for x in (text.keys, text.values))
    return [
        (keys[layer, :, head], values[layer, :, head]) for layer in range(len(keys)) for head in range(keys.shape[2])
    ]


def plain_redundancy(keys: Floats, threshold: float) -> Floats:
    """As the reference code of R-KV has it, but that a key without a similar one takes nothing from the first."""
    directions = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    cosines = directions @ directions.T
    np.fill_diagonal(cosines, 0)
    for i in range(len(keys)):
        similar = np.flatnonzero((cosines[i] > threshold) & (np.arange(len(keys)) != i))
        if len(similar):
            cosines[i, similar[-1]] = 0
    return cosines.mean(axis=0)


def plain_deviation(x: Floats, lag: int, sinks: int) -> Floats:
    result = np.full(len(x), np.inf)
    begin = sinks
    while begin + 2 * lag <= len(x):
        run, following = x[begin : begin + lag], x[begin + lag : begin + 2 * lag]
        least, most = following.min(axis=0), following.max(axis=0)
        weights = np.exp([np.std((token - least) / (most - least), ddof=1) for token in run])
        result[begin : begin + lag] = weights / weights.sum()
        begin += lag
    return result


def plain_mean_turn(turn: Rotation, head_dim: int) -> Floats:
    half = turn.cos.shape[1]
    mean_turn = np.zeros((head_dim, head_dim))
    for cos, sin in zip(turn.cos.double().numpy(), turn.sin.double().numpy(), strict=True):
        matrix = np.eye(head_dim)
        for i in range(half):
            matrix[i, i] = matrix[i + half, i + half] = cos[i]
            matrix[i, i + half], matrix[i + half, i] = -sin[i], sin[i]
        mean_turn += matrix / len(turn.cos)
    return mean_turn


def plain_future(text: Text) -> Floats:
    """By the mean matrix of the turns to come, written out."""
    turns = text.future().turns
    keys, values = (x[:, text.live].double().numpy() for x in (text.keys, text.values))
    num_heads, group = text.queries.shape[2], text.queries.shape[2] // keys.shape[2]
    result = np.zeros(keys.shape[1])
    for layer, spec in enumerate(text.specs):
        turn, head_dim = spec.pick(turns), text.keys.shape[3]
        mean_turn = np.eye(head_dim) if turn is None else plain_mean_turn(turn, head_dim)
        is_seen = np.array(text.live) > (-1 if spec.window is None else len(text) - spec.window)
        for head in range(num_heads):
            queries = text.queries[layer, :, head].double().numpy()
            mean = mean_turn @ queries.mean(axis=0)
            covariance = mean_turn @ np.cov(queries.T, bias=True) @ mean_turn.T
            k = keys[layer, :, head // group]
            scores = np.array([spec.scale * mean @ key + spec.scale**2 / 2 * key @ covariance @ key for key in k])
            weights = np.where(is_seen, np.exp(scores - scores[is_seen].max()), 0)
            result += weights / weights.sum() * np.linalg.norm(values[layer, :, head // group], axis=1)
    return result / (len(text.specs) * num_heads)


def plain(text: Text, statistic: CacheStatistic) -> Floats:
    """[T] from the definitions, in float64."""
    heads = each_head(text)
    if isinstance(statistic, KeyNorm):
        values = np.mean([np.linalg.norm(keys, axis=1) for keys, _ in heads], axis=0)
    elif isinstance(statistic, ValueNorm):
        values = np.mean([np.linalg.norm(values, axis=1) for _, values in heads], axis=0)
    elif isinstance(statistic, KeySimilarity):
        cosines = []
        for keys, _ in heads:
            directions = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            anchor = directions.mean(axis=0)
            cosines.append(directions @ anchor / np.linalg.norm(anchor))
        values = np.mean(cosines, axis=0)
    elif isinstance(statistic, KeyRedundancy):
        values = np.mean([plain_redundancy(keys, statistic.threshold) for keys, _ in heads], axis=0)
    elif isinstance(statistic, LagDeviation):
        parts = [plain_deviation(k, statistic.lag, statistic.sinks) for k, _ in heads]
        parts = [
            part + plain_deviation(v, statistic.lag, statistic.sinks) for part, (_, v) in zip(parts, heads, strict=True)
        ]
        values = np.mean(parts, axis=0)
    else:
        values = plain_future(text)
    result = np.full(len(text), np.nan)
    result[text.live] = values
    return result


DEAD = [1, 5, *range(20, 41), 60]


class TestValues:
    @by_name
    @pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 7), (8, 8, 20), (9, 3, 64)], ids=str)
    @pytest.mark.parametrize("dead", [(), DEAD], ids=["alive", "evicted"])
    def test_equal_plain_loops(
        self, dead: Sequence[int], heads: tuple[int, int, int], statistic: CacheStatistic
    ) -> None:
        text = Text.random(90, dead, heads=heads, num_layers=3)
        (found,) = read([text], statistic, num_new=3, scatter=True)
        np.testing.assert_allclose(found, plain(text, statistic), rtol=1e-5, atol=1e-6)

    @by_name
    def test_a_lone_token(self, statistic: CacheStatistic) -> None:
        text = Text.random(1)
        (found,) = read([text], statistic)
        np.testing.assert_allclose(found, plain(text, statistic), rtol=1e-5, atol=1e-6)

    @by_name
    @pytest.mark.parametrize(
        "kv", [(name, name) for name in KV_FORMATS if name != "float32"] + [("int8", "float16")], ids=str
    )
    def test_tokens_count_as_the_cache_holds_them(self, kv: tuple[str, str], statistic: CacheStatistic) -> None:
        text = Text.random(60, DEAD[:4])
        (found,) = read([text], statistic, kv=kv, num_new=2)
        store = KVStore(KVShape(1, 2, 16, *kv), 4, 16)
        held = []
        for plane, x in ((store.layers[0].keys, text.keys), (store.layers[0].values, text.values)):
            places = torch.arange(len(text))
            held.append(torch.stack([plane.write(layer, places // 16, places % 16) for layer in x]))
        expected = plain(Text(*held, text.queries, text.dead, text.specs), statistic)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    def test_what_a_window_hides_from_all_queries_to_come_draws_none_in_that_layer(self) -> None:
        text = Text.random(50, [45], window=10)
        (found,) = read([text], STATISTICS[5])
        np.testing.assert_allclose(found, plain(text, STATISTICS[5]), rtol=1e-5)
        (blind,) = read([Text.random(50, [45], window=1)], STATISTICS[5])
        assert np.isfinite(blind[text.live]).all()

    def test_queries_that_do_not_vary_and_do_not_turn_are_a_plain_softmax(self) -> None:
        text = Text.random(40, num_layers=1)
        query = text.queries[:, :1].expand(-1, 5, -1, -1)
        view = cache_statistics.LayerView(
            0,
            replace(text.specs[0], rotation=None),
            torch.arange(40),
            lambda: text.keys[0].transpose(0, 1).contiguous(),
            lambda: torch.ones(2, 40, 4) / 2,  # of length one
            FutureQueries(lambda layer: query[layer], [], 40),
        )
        found = cache_statistics.read(view, STATISTICS[5])
        scores = torch.einsum("hd,nhd->hn", query[0, 0] * text.specs[0].scale, text.keys[0].repeat_interleave(2, dim=1))
        torch.testing.assert_close(found.float(), scores.softmax(dim=1).mean(dim=0))

    def test_the_last_of_several_alike_is_not_redundant(self) -> None:
        text = Text.random(12, heads=(1, 1, 16), num_layers=1)
        text.keys[:] = torch.eye(16)[:12].view(1, 12, 1, 16)  # no two alike
        text.keys[0, [2, 5, 9]] = torch.eye(16)[15]
        (found,) = read([text], KeyRedundancy(0.5))
        # Tokens 2 and 5 are both alike to 9, the last, which does not count for it; 9's own last one is 5.
        expected = np.zeros(12)
        expected[2], expected[5], expected[9] = 2 / 12, 1 / 12, 0
        np.testing.assert_allclose(found, expected, atol=1e-6)

    @pytest.mark.parametrize("pair_block", [1, 5, 32])
    def test_pairs_are_looked_at_block_by_block(self, pair_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
        text = Text.random(90, DEAD)
        monkeypatch.setattr(cache_statistics, "PAIR_BLOCK", pair_block)
        monkeypatch.setattr(cache_statistics, "FIRST_BLOCK", min(pair_block, 4))
        for threshold in (-1.0, 0.0, 0.4, 0.7, 1.0):
            (found,) = read([text], KeyRedundancy(threshold))
            np.testing.assert_allclose(found, plain(text, KeyRedundancy(threshold)), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(("num_tokens", "num_scored"), [(16, 0), (17, 7), (23, 7), (24, 14), (30, 14), (31, 21)])
    def test_the_last_whole_run_and_what_follows_it_are_not_scored(self, num_tokens: int, num_scored: int) -> None:
        text = Text.random(num_tokens)
        (found,) = read([text], LagDeviation(lag=7, sinks=3))
        assert np.isfinite(found).tolist() == [3 <= p < 3 + num_scored for p in range(num_tokens)]

    def test_a_channel_in_which_the_next_run_does_not_vary_tells_nothing(self) -> None:
        text = Text.random(20)
        text.keys[..., 3] = 0.0
        without = Text.random(20)
        without.keys[..., 3] = 0.0
        without.keys[:, :10, :, 3] = 5.0  # only the run that is scored
        statistic = LagDeviation(lag=10, sinks=0)
        assert np.array_equal(*(read([each], statistic)[0] for each in (text, without)))

    def test_zero_keys_are_no_fault(self) -> None:
        text = Text.random(30)
        text.keys[:, 4] = 0.0
        for statistic in STATISTICS[:4]:
            (found,) = read([text], statistic)
            assert np.isfinite(found).all()


class TestOrders:
    @pytest.mark.parametrize("statistic", [KeyNorm(), ValueNorm()])
    def test_known_tokens_of_a_fixed_statistic_are_left_out(self, statistic: CacheStatistic) -> None:
        texts = [Text.random(50, [3], seed=i) for i in range(4)]
        firsts = [0, 30, 48, 50]
        found = read(texts, statistic, num_new=4, scatter=True, first=firsts)
        everything = read(texts, statistic, num_new=4, scatter=True)
        for one, whole, first in zip(found, everything, firsts, strict=True):
            assert np.isnan(one[:first]).all()
            assert np.array_equal(one[first:], whole[first:], equal_nan=True)

    def test_first_is_of_no_account_where_tokens_depend_on_each_other(self) -> None:
        text = Text.random(40)
        for statistic in STATISTICS[2:]:
            assert np.array_equal(read([text], statistic, first=35), read([text], statistic))

    @by_name
    def test_several_sequences_are_each_by_itself(self, statistic: CacheStatistic) -> None:
        texts = [Text.random(10 + 30 * i, [4], seed=i) for i in range(4)]
        together = read(texts, statistic, num_new=5)
        for text, found in zip(texts, together, strict=True):
            assert np.array_equal(found, read([text], statistic, num_new=5)[0], equal_nan=True)

    def test_fixed_statistics_are_read_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = [Text.random(10 + 30 * i, [4], seed=i) for i in range(3)]
        for statistic in STATISTICS[:2]:
            whole = read(texts, statistic)
            monkeypatch.setattr(scan, "PIECE_TOKENS", 7)
            assert all(map(equal, read(texts, statistic), whole))
            monkeypatch.undo()

    def test_where_no_decision_is_due_there_are_no_values(self) -> None:
        texts = [Text.random(30, seed=i) for i in range(3)]
        found = read(texts, STATISTICS[5], due=[True, False, True])
        everywhere = read(texts, STATISTICS[5])
        assert np.isnan(found[1]).all()
        assert equal(found[0], everywhere[0])
        assert equal(found[2], everywhere[2])

    def test_positions_are_needed_for_all_that_is_read(self) -> None:
        assert all(map(needs_positions, STATISTICS))
        assert not needs_positions(Sum())
        assert {type(statistic) for statistic in STATISTICS} == CACHE_STATISTICS


def equal(a: Floats, b: Floats) -> bool:
    return np.array_equal(a, b, equal_nan=True)


class TestBits:
    """Exact equality with a lone sequence in blocks of 16, rows in order, one new token."""

    @by_name
    @settings(max_examples=25)
    @given(data=st.data())
    def test_layout_chunks_and_neighbours_change_nothing(self, statistic: CacheStatistic, data: st.DataObject) -> None:
        num_tokens = data.draw(st.integers(1, 70), label="tokens")
        num_new = data.draw(st.integers(1, num_tokens), label="new")
        past = st.integers(0, num_tokens - num_new - 1)
        dead = data.draw(st.sets(past) if num_tokens > num_new else st.just(set()), label="dead")
        group = data.draw(st.integers(1, 3), label="group")
        num_kv_heads = data.draw(st.sampled_from((1, 2, 3, 5, 8, 17)), label="KV heads")
        heads = (group * num_kv_heads, num_kv_heads, data.draw(st.sampled_from((4, 16, 18, 33)), label="width"))
        text = Text.random(num_tokens, dead, heads=heads)
        (expected,) = read([text], statistic)
        others = [Text.random(n, heads=heads, seed=n) for n in data.draw(st.lists(st.integers(70, 80), max_size=2))]
        found = read(
            [*others, text],
            statistic,
            num_new=num_new,
            block_size=data.draw(block_sizes().filter(lambda size: size < 64), label="block size"),
            scatter=data.draw(st.booleans(), label="scatter"),
            seed=data.draw(st.integers(0, 99), label="seed"),
        )[-1]
        assert equal(found, expected)

    @by_name
    def test_the_number_of_threads_changes_nothing(self, statistic: CacheStatistic) -> None:
        text = Text.random(300, heads=(9, 3, 64))
        (expected,) = read([text], statistic, block_size=16)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            (found,) = read([text], statistic, block_size=16)
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(num_threads)
        assert equal(found, expected)
