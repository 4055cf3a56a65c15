"""The CPU kernels against the oracle: any layout of the past, every format, few new tokens a slice and many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.instruction_sets import ISAS
from tests.plans import order
from tests.strategies import BLOCK_SIZES
from vtoken.attention.cache import CachePlane, LayerCache
from vtoken.attention.cpu import CpuAttention
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.reference import ReferenceAttention
from vtoken.attention.spec import AttentionSpec
from vtoken.base.kv_format import KV_FORMATS
from vtoken.policies.statistics import CountLow, Sum, SumLast
from vtoken.quant.kv_format import encode
from vtoken.schedule.plan import StatisticOrder

PLAIN = AttentionSpec(scale=0.125)
FORMATS = list(KV_FORMATS)
HEADS = {"mha": (4, 4, 64), "gqa 9/3": (9, 3, 64), "mqa 8/1": (8, 1, 80), "odd": (6, 2, 14), "wide": (10, 2, 128)}


@dataclass(frozen=True)
class Past:
    """A slice: rows of its past, which of them live, and how many tokens are new."""

    num_rows: int
    num_new: int = 1
    live: float = 1.0  # chance of a row to be live
    empty: float = 0.0  # chance of an entry to be EMPTY
    moved: bool = False  # rows in another order than positions


@dataclass(frozen=True)
class Case:
    """What `attend` takes. Everything in the cache that no slice may read is NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache: LayerCache
    meta: AttentionMetadata

    def run(
        self, backend: CpuAttention | ReferenceAttention, spec: AttentionSpec = PLAIN, mass: bool = True
    ) -> tuple[np.ndarray, np.ndarray | None]:
        out, gathered = self.gather(backend, [order(Sum(), range(self.meta.num_slices))] if mass else [], spec)
        return out, gathered[0] if mass else None

    def gather(
        self,
        backend: CpuAttention | ReferenceAttention,
        orders: Sequence[StatisticOrder],
        spec: AttentionSpec = PLAIN,
        num_layers: int = 1,
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The output, and what was gathered for each order, computed `num_layers` times."""
        meta = replace(self.meta, tallies=[], _tally_of={})
        for each in orders:
            meta.add(each)
        for _ in range(num_layers):
            out = backend.attend(spec, self.q, self.k, self.v, self.cache, meta)
        return out.numpy(), [meta.gathered(each) for each in orders]

    def only(self, s: int) -> Case:
        """The same slice without its neighbours."""
        meta, own = self.meta, slice(self.meta.starts[s], self.meta.starts[s + 1])
        num_entries = int(np.flatnonzero(meta.block_tables[s] >= 0).max(initial=-1)) + 1  # nor with their long tables
        alone = AttentionMetadata(
            block_size=meta.block_size,
            starts=[0, own.stop - own.start],
            positions=meta.positions[own],
            write_rows=meta.write_rows[own],
            block_tables=meta.block_tables[s : s + 1, :num_entries].copy(),
            masks=meta.masks[s : s + 1, :num_entries].copy(),
            past_live=meta.past_live[s : s + 1],
            row_positions=None
            if meta.row_positions is None
            else meta.row_positions[s : s + 1, : num_entries * meta.block_size].copy(),
        )
        return Case(self.q[own], self.k[own], self.v[own], self.cache, alone)


def make(
    pasts: Sequence[Past],
    *,
    heads: tuple[int, int, int] = (9, 3, 64),
    block_size: int = 16,
    key_format: str = "float32",
    value_format: str = "float32",
    spread: float = 1.0,
    seed: int = 0,
) -> Case:
    """Random queries, keys and values; blocks lie at random places among others that nobody owns."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads, head_dim = heads
    num_entries = max(-(-(p.num_rows + p.num_new) // block_size) for p in pasts)
    num_blocks = len(pasts) * num_entries + 3
    free = rng.permutation(num_blocks).tolist()
    tables = np.full((len(pasts), num_entries), -1, dtype=np.int32)
    live = np.zeros((len(pasts), num_entries * block_size), dtype=bool)
    positions = np.tile(np.arange(num_entries * block_size, dtype=np.int32), (len(pasts), 1))
    starts, own_positions, write_rows = [0], [], []
    for s, past in enumerate(pasts):
        for entry in range(-(-past.num_rows // block_size)):
            if rng.random() < past.empty:
                continue
            tables[s, entry] = free.pop()
            in_past = np.arange(entry * block_size, min((entry + 1) * block_size, past.num_rows))
            live[s, in_past] = rng.random(len(in_past)) < past.live
        if past.moved:
            positions[s, : past.num_rows] = rng.permutation(past.num_rows)
        starts.append(starts[-1] + past.num_new)
        own_positions.extend(range(past.num_rows, past.num_rows + past.num_new))
        # In a row of their own, wherever: a kernel must not take rows for positions.
        write_rows.extend(rng.permutation(np.flatnonzero(~live[s]))[: past.num_new].tolist())

    words = -(-block_size // 32)
    padded = np.zeros((len(pasts), num_entries, words * 32), dtype=bool)
    padded[:, :, :block_size] = live.reshape(len(pasts), num_entries, block_size)
    masks = np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32)
    live_slots = np.concatenate(
        [
            tables[s, rows // block_size].astype(np.int64) * block_size + rows % block_size
            for s, rows in ((s, np.flatnonzero(live[s])) for s in range(len(pasts)))
        ]
    )

    def noise(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))

    def plane(name: str) -> CachePlane:
        form = KV_FORMATS[name]
        poison = torch.full((num_blocks, num_kv_heads, block_size, head_dim), torch.nan)
        cells, scales = encode(form, poison)
        made = CachePlane(cells, scales, form)
        slots = torch.from_numpy(live_slots)
        made.write(noise(len(live_slots), num_kv_heads, head_dim), slots // block_size, slots % block_size)
        return made

    meta = AttentionMetadata(
        block_size=block_size,
        starts=starts,
        positions=np.array(own_positions, dtype=np.int64),
        write_rows=np.array(write_rows, dtype=np.int32),
        block_tables=tables,
        masks=masks,
        past_live=live.sum(axis=1).astype(np.int32),
        row_positions=positions if any(p.moved for p in pasts) else None,
    )
    num_tokens = starts[-1]
    return Case(
        spread * noise(num_tokens, num_heads, head_dim),
        noise(num_tokens, num_kv_heads, head_dim),
        noise(num_tokens, num_kv_heads, head_dim),
        LayerCache(plane(key_format), plane(value_format)),
        meta,
    )


def check(case: Case, spec: AttentionSpec = PLAIN, isa: str = "native") -> None:
    """Outputs and attention mass as the oracle has them."""
    expected, expected_mass = case.run(ReferenceAttention(), spec)
    out, mass = case.run(CpuAttention(num_threads=2, isa=isa), spec)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))
    np.testing.assert_allclose(mass, expected_mass, rtol=3e-6, atol=1e-6)
    without, _ = case.run(CpuAttention(num_threads=1, isa=isa), spec, mass=False)
    assert np.array_equal(without, out), "collecting the mass, or another thread, changed the output"


MIXED = [
    Past(300, live=0.6, empty=0.2),
    Past(0),
    Past(37, num_new=3),
    Past(600, num_new=20, live=0.9, empty=0.1),
    Past(64),
    Past(90, num_new=4, live=0.02),
    Past(700),
    Past(1000, num_new=2, live=0.4, moved=True),
]


class TestAgainstTheOracle:
    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("block_size", [4, 5, 16, 33, 64, 256])
    def test_block_sizes(self, block_size: int, isa: str) -> None:
        check(make(MIXED, block_size=block_size), isa=isa)

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
    def test_head_shapes(self, heads: tuple[int, int, int], isa: str) -> None:
        check(make(MIXED, heads=heads, block_size=12), isa=isa)

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("value_format", FORMATS)
    @pytest.mark.parametrize("key_format", FORMATS)
    def test_formats(self, key_format: str, value_format: str, isa: str) -> None:
        pasts = [Past(300, live=0.6, empty=0.2), Past(40, num_new=3), Past(30, num_new=6)]
        for head_dim in (64, 14):
            case = make(pasts, heads=(6, 2, head_dim), key_format=key_format, value_format=value_format)
            check(case, isa=isa)

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize(
        "spec",
        [
            AttentionSpec(scale=0.125, window=37),
            AttentionSpec(scale=0.125, window=1),
            AttentionSpec(scale=0.125, window=2),
            AttentionSpec(scale=0.2, soft_cap=1.5),
            AttentionSpec(scale=0.1, window=350, soft_cap=5.0),
        ],
        ids=str,
    )
    def test_windows_and_soft_caps(self, spec: AttentionSpec, isa: str) -> None:
        check(make(MIXED), spec, isa)
        check(make([past for past in MIXED if not past.moved]), spec, isa)  # without row_positions

    @pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5])
    def test_few_new_tokens(self, num_new: int) -> None:
        check(make([Past(0, num_new), Past(1, num_new), Past(290, num_new, live=0.5)]))

    @pytest.mark.parametrize("group", [1, 2, 5, 7, 16, 64])
    def test_groups(self, group: int) -> None:
        check(make([Past(50, 2), Past(20)], heads=(group * 2, 2, 16)))

    @settings(max_examples=60)
    @given(data=st.data())
    def test_anything_goes(self, data: st.DataObject) -> None:
        share = st.sampled_from((0.0, 0.1, 0.5, 0.95, 1.0))
        pasts = st.builds(Past, st.integers(0, 560), st.integers(1, 7), share, share, st.booleans())
        num_kv_heads = data.draw(st.integers(1, 3), label="KV heads")
        case = make(
            data.draw(st.lists(pasts, min_size=1, max_size=4), label="slices"),
            heads=(
                num_kv_heads * data.draw(st.integers(1, 6), label="group"),
                num_kv_heads,
                data.draw(st.sampled_from((1, 8, 14, 16, 32, 50, 64, 80)), label="head width"),
            ),
            block_size=data.draw(st.sampled_from(BLOCK_SIZES), label="block size"),
            key_format=data.draw(st.sampled_from(FORMATS), label="keys"),
            value_format=data.draw(st.sampled_from(FORMATS), label="values"),
            seed=data.draw(st.integers(0, 999), label="seed"),
        )
        spec = AttentionSpec(
            scale=0.125,
            window=data.draw(st.none() | st.integers(1, 600), label="window"),
            soft_cap=data.draw(st.none() | st.sampled_from((0.5, 30.0)), label="soft cap"),
        )
        check(case, spec, data.draw(st.sampled_from(ISAS), label="instructions"))


class TestBits:
    @pytest.mark.parametrize("window", [None, 300])
    def test_neighbours_threads_and_waves_change_nothing(self, window: int | None) -> None:
        # 24 long pasts with mass are more than one wave holds.
        pasts = [*MIXED, *(Past(1500 + 40 * i, num_new=1 + i % 4, live=0.9) for i in range(24))]
        case, spec = make(pasts), AttentionSpec(scale=0.125, window=window)
        expected, expected_mass = case.run(CpuAttention(num_threads=1), spec)
        for _ in range(3):
            out, mass = case.run(CpuAttention(num_threads=2), spec)
            assert np.array_equal(out, expected)
            assert np.array_equal(mass, expected_mass)
        for s in (0, 4, 6, 7, 9, 20):
            alone, mass = case.only(s).run(CpuAttention(num_threads=2), spec)
            assert np.array_equal(alone, expected[case.meta.starts[s] : case.meta.starts[s + 1]])
            assert np.array_equal(mass[0], expected_mass[s, : mass.shape[1]])

    def test_mass_adds_up_over_layers(self) -> None:
        case = make(MIXED)
        _, once = case.run(CpuAttention())
        _, (twice,) = case.gather(CpuAttention(), [order(Sum(), range(len(MIXED)))], num_layers=2)
        assert np.array_equal(twice, 2 * once)
        assert np.array_equal(once, np.round(once * 2.0**28) * 2.0**-28), "mass comes in units of 2^-28"


class TestTallies:
    """Few new tokens a slice, each slice with a wish of its own."""

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("window", [None, 2, 120])
    @pytest.mark.parametrize("value_format", ["float32", "int8"])
    def test_equal_the_oracle(self, value_format: str, window: int | None, isa: str) -> None:
        case = make([*MIXED, Past(700, num_new=4, live=0.7)], value_format=value_format)
        spec = AttentionSpec(scale=0.125, window=window)
        last = case.meta.positions[np.array(case.meta.starts[1:]) - 1]
        some = np.arange(0, len(last), 2)
        orders = [
            order(Sum(), range(len(last))),
            order(SumLast(2), range(len(last)), last - 1),
            order(SumLast(1), some, last[some] + (some == 2)),
            order(CountLow(3), range(len(last)), last - 2),
        ]
        out, found = case.gather(CpuAttention(isa=isa), orders, spec)
        expected_out, expected = case.gather(ReferenceAttention(), orders, spec)
        np.testing.assert_allclose(out, expected_out, atol=1e-5)
        for mine, theirs in zip(found[:3], expected[:3], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        assert not found[2][1].any(), "its only query is below the first that counts"
        # A probability within rounding of 1 / t may fall on either side.
        assert np.abs(found[3] - expected[3]).max() <= 1
        assert (found[3] != expected[3]).mean() < 1e-3
        assert found[3].any()

    def test_what_a_slice_wants_changes_no_bit_of_the_output(self) -> None:
        case = make(MIXED)
        plain, _ = case.run(CpuAttention(), mass=False)
        out, _ = case.gather(CpuAttention(), [order(Sum(), [0, 3]), order(CountLow(2), [3, 4], 10**6)])
        assert np.array_equal(out, plain)

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("window", [None, 50])
    def test_equal_shares_are_not_low(self, window: int | None, isa: str) -> None:
        case = make([Past(n, 1 + n % 4, live=0.9) for n in (0, 2, 3, 9, 60, 700)])
        case.q[:] = 0
        orders = [order(CountLow(9), range(6))]
        _, (low,) = case.gather(CpuAttention(isa=isa), orders, AttentionSpec(scale=0.125, window=window))
        assert not low.any()


class TestExtremes:
    def test_huge_scores_do_not_overflow(self) -> None:
        case = make([Past(500), Past(300, num_new=3)], spread=1e4)
        out, mass = case.run(CpuAttention())
        expected, expected_mass = case.run(ReferenceAttention())
        # Scores of 1e4 are only good to 1e-3.
        np.testing.assert_allclose(out, expected, atol=1e-2)
        np.testing.assert_allclose(mass, expected_mass, atol=1e-2)

    @pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("where", ["keys", "values"])
    def test_what_is_not_a_number_stays_with_those_who_see_it(self, where: str, what: float) -> None:
        case = make([Past(600, live=0.8), Past(600, live=0.8), Past(40, num_new=3)])
        clean, _ = case.run(CpuAttention())
        plane = case.cache.keys if where == "keys" else case.cache.values
        row = int(np.flatnonzero(case.meta.pasts[1].rows > 300)[0])
        slot = int(case.meta.pasts[1].slots[row])
        plane.cells[slot // 16, 1, slot % 16, 5] = what
        expected, expected_mass = case.run(ReferenceAttention())
        out, mass = case.run(CpuAttention())
        np.testing.assert_allclose(out, expected, atol=1e-5)
        np.testing.assert_allclose(mass, expected_mass, atol=1e-6)
        assert np.array_equal(out[[0, 2, 3, 4]], clean[[0, 2, 3, 4]]), "another slice was touched"
        assert np.isfinite(out[1, [0, 1, 2, 6, 7, 8]]).all(), "another KV head was touched"

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("head_dim", [14, 64, 80])
    @pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
    def test_every_code(self, name: str, head_dim: int, isa: str) -> None:
        """Codes that are no numbers too: one a key, in all its elements, and all of them at every place of a value."""
        case = make([Past(256)], heads=(1, 1, head_dim), key_format=name, value_format=name)
        slots, rows = case.meta.pasts[0].slots, torch.arange(256)
        of_keys = rows[:, None].expand(-1, head_dim)
        for plane, codes in ((case.cache.keys, of_keys), (case.cache.values, of_keys + torch.arange(head_dim))):
            plane.cells.view(torch.uint8)[slots // 16, 0, slots % 16] = codes.to(torch.uint8)
        for some_rows in rows.split(24):
            masks = np.zeros_like(case.meta.masks)
            np.bitwise_or.at(masks, (0, some_rows // 16, 0), np.uint32(1) << (some_rows % 16).numpy().astype(np.uint32))
            some = replace(case, meta=replace(case.meta, masks=masks, past_live=np.array([len(some_rows)], np.int32)))
            expected, _ = some.run(ReferenceAttention())
            out, _ = some.run(CpuAttention(isa=isa))
            np.testing.assert_allclose(out, expected, atol=1e-5 * np.nanmax(np.abs(expected), initial=1.0))

    def test_own_tokens_that_are_not_numbers(self) -> None:
        case = make([Past(40, num_new=3), Past(40)])
        clean, _ = case.run(CpuAttention())
        case.v[1, 0, 3] = torch.nan
        case.k[1, 1, 3] = torch.nan
        out, _ = case.run(CpuAttention())
        expected, _ = case.run(ReferenceAttention())
        np.testing.assert_allclose(out[1:3], expected[1:3], atol=1e-5)
        assert np.isnan(out[1:3]).any()
        assert np.array_equal(out[[0, 3]], clean[[0, 3]]), "a token before it, or another slice, was touched"

    def test_nothing_to_do(self) -> None:
        case = make([Past(10)])
        meta = replace(
            case.meta,
            starts=[0],
            positions=np.zeros(0, np.int64),
            write_rows=np.zeros(0, np.int32),
            block_tables=np.zeros((0, 1), np.int32),
            masks=np.zeros((0, 1, 1), np.uint32),
            past_live=np.zeros(0, np.int32),
        )
        assert CpuAttention().attend(PLAIN, case.q[:0], case.k[:0], case.v[:0], case.cache, meta).shape == (0, 9, 64)


class TestInterface:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_queries_of_fewer_bits(self, dtype: torch.dtype) -> None:
        case = make([Past(90), Past(20, num_new=8)])
        case = replace(case, q=case.q.to(dtype))
        out = CpuAttention().attend(PLAIN, case.q, case.k, case.v, case.cache, case.meta)
        expected = ReferenceAttention().attend(PLAIN, case.q, case.k, case.v, case.cache, case.meta)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected)

    def test_strided_tokens(self) -> None:
        case = make(MIXED)
        expected, _ = case.run(CpuAttention())
        joined = torch.cat([case.q, case.k, case.v], dim=1)
        q, k, v = joined.split([9, 3, 3], dim=1)
        assert not q.is_contiguous()
        assert np.array_equal(replace(case, q=q, k=k, v=v).run(CpuAttention())[0], expected)
        transposed = case.q.transpose(0, 1).contiguous().transpose(0, 1)
        assert np.array_equal(replace(case, q=transposed).run(CpuAttention())[0], expected)

    def test_slots_read(self) -> None:
        case = make([Past(300, live=0.6), Past(100, num_new=4), Past(200, num_new=9, moved=True)])
        backend = CpuAttention()
        case.run(backend)
        assert backend.slots_read == case.meta.past_live.sum()
        backend.slots_read = 0
        case.run(backend, AttentionSpec(scale=0.125, window=50))
        first = case.meta.positions[case.meta.starts[:-1]]
        seen = [int((past.positions > p - 50).sum()) for past, p in zip(case.meta.pasts, first, strict=True)]
        assert backend.slots_read == sum(seen)
