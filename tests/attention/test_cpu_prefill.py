"""The CPU kernels on chunks of many new tokens: right against the oracle, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.attention.layer import PLAIN, SUM, Layer, Text, dense, dense_low, run
from tests.instruction_sets import ISAS
from tests.plans import Lane, Slice
from tests.plans import order as make_order
from tests.strategies import block_sizes, deaths
from vtoken.attention.cpu import CpuAttention
from vtoken.attention.spec import AttentionSpec
from vtoken.base.kv_format import KV_FORMATS
from vtoken.policies.statistics import AttentionStatistic, CountLow, Sum, SumLast

# The sources have one form for vectors of 16, of 8 and of 4 numbers.
FORMATS = list(KV_FORMATS)
DEATHS = {40: [0, 3, 17, 39], 100: [1, 2, *range(50, 90)], 180: [4, 99, 100, 150]}
SPECS = {
    "plain": PLAIN,
    "window": AttentionSpec(scale=0.25, window=37),
    "window of one": AttentionSpec(scale=0.25, window=1),
    "soft cap": AttentionSpec(scale=0.25, soft_cap=1.5),
    "window and soft cap": AttentionSpec(scale=0.1, window=150, soft_cap=30.0),
}


def close(found: tuple[torch.Tensor, np.ndarray], expected: tuple[torch.Tensor, np.ndarray]) -> None:
    """Outputs, and the attention that each position drew."""
    for mine, theirs in zip(found, expected, strict=True):
        theirs = np.asarray(theirs)
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=0, atol=1e-5 * max(1.0, np.abs(theirs).max()))


def same(found: tuple[torch.Tensor, np.ndarray], expected: tuple[torch.Tensor, np.ndarray]) -> bool:
    return torch.equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])


class TestValues:
    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    @pytest.mark.parametrize("deaths", [{}, DEATHS], ids=["alive", "evicted"])
    def test_equals_dense_softmax(self, deaths: dict[int, list[int]], spec: AttentionSpec, isa: str) -> None:
        text = Text.random(200, deaths=deaths)
        backend = CpuAttention(isa=isa)
        close(run(text, cuts=[7, 131], spec=spec, scatter=True, neighbours=2, backend=backend), dense(text, spec))

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim"),
        [(9, 3, 64), (8, 8, 8), (8, 4, 80), (8, 1, 128), (3, 1, 20), (6, 2, 17), (2, 1, 1), (64, 1, 96)],
    )
    def test_grouped_heads(self, num_heads: int, num_kv_heads: int, head_dim: int, isa: str) -> None:
        text = Text.random(70, num_heads, num_kv_heads, head_dim)
        spec = AttentionSpec(scale=head_dim**-0.5)
        close(run(text, cuts=[20], block_size=8, spec=spec, backend=CpuAttention(isa=isa)), dense(text, spec))

    @pytest.mark.parametrize("cuts", [[], [500]], ids=["from scratch", "past"])
    def test_more_than_threads_and_tiles_hold_at_once(self, cuts: list[int]) -> None:
        text = Text.random(1300, num_heads=6, num_kv_heads=2, head_dim=32)
        out, drawn = run(text, cuts=cuts, spec=AttentionSpec(scale=0.1), backend=CpuAttention(num_threads=2))
        q, k, v = (x.transpose(0, 1)[None].double() for x in (text.q, text.k, text.v))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1, enable_gqa=True)
        np.testing.assert_allclose(out, expected[0].transpose(0, 1), atol=1e-5)
        assert drawn.sum() == pytest.approx(1300 * 6, rel=1e-6)

    @pytest.mark.parametrize("value_format", FORMATS)
    @pytest.mark.parametrize("key_format", FORMATS)
    def test_formats(self, key_format: str, value_format: str) -> None:
        for head_dim in (64, 18):
            text = Text.random(150, 4, 2, head_dim, deaths={60: list(range(5, 50, 3))})
            settings = {"cuts": [90], "kv": (key_format, value_format), "scatter": True}
            close(run(text, **settings, backend=CpuAttention()), run(text, **settings))

    @settings(max_examples=40)
    @given(data=st.data())
    def test_anything_goes(self, data: st.DataObject) -> None:
        num_tokens = data.draw(st.integers(1, 280), label="tokens")
        places = st.sets(st.integers(1, num_tokens), max_size=3)
        dead = data.draw(deaths(num_tokens), label="deaths")
        num_kv_heads = data.draw(st.integers(1, 3), label="KV heads")
        num_heads = num_kv_heads * data.draw(st.integers(1, 5), label="group")
        width = data.draw(st.sampled_from((1, 8, 14, 16, 40, 64)), label="head width")
        text = Text.random(num_tokens, num_heads, num_kv_heads, width, deaths=dead)
        window = data.draw(st.none() | st.integers(1, 300), label="window")
        soft_cap = data.draw(st.none() | st.sampled_from((0.5, 20.0)), label="soft cap")
        arrangement = {
            "spec": AttentionSpec(scale=width**-0.5, window=window, soft_cap=soft_cap),
            "cuts": sorted(data.draw(places, label="cuts")),
            "block_size": data.draw(block_sizes(), label="block size"),
            "kv": tuple(data.draw(st.sampled_from(FORMATS), label=of) for of in ("keys", "values")),
            "scatter": data.draw(st.booleans(), label="scatter"),
            "neighbours": data.draw(st.integers(0, 2), label="neighbours"),
            "seed": data.draw(st.integers(0, 99), label="seed"),
        }
        backend = CpuAttention(num_threads=2, isa=data.draw(st.sampled_from(ISAS), label="instructions"))
        first = data.draw(st.integers(0, num_tokens), label="first")
        close(run(text, **arrangement, first=first, backend=backend), run(text, **arrangement, first=first))


class TestBits:
    """Exact equality."""

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_threads_neighbours_and_blocks(self, spec: AttentionSpec, isa: str) -> None:
        text = Text.random(300, num_heads=9, num_kv_heads=3, deaths=DEATHS)

        def result(num_threads: int, neighbours: int = 0, block_size: int = 16) -> tuple[torch.Tensor, np.ndarray]:
            backend = CpuAttention(num_threads, isa)
            return run(text, spec=spec, neighbours=neighbours, block_size=block_size, backend=backend)

        expected = result(1)
        assert same(result(2), expected)
        assert same(result(3, neighbours=2), expected)
        assert same(result(1, neighbours=1, block_size=33), expected)

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_chunks_while_rows_are_in_order(self, spec: AttentionSpec, isa: str) -> None:
        text = Text.random(300)
        backend = CpuAttention(num_threads=1, isa=isa)
        expected = run(text, spec=spec, backend=backend)
        for cuts in (range(5, 300, 5), [129], [16, 64, 200, 290]):
            assert same(run(text, cuts=cuts, spec=spec, backend=backend), expected)

    def test_the_mass_is_not_worth_a_bit_of_the_output(self) -> None:
        text = Text.random(120)
        outputs = []
        for statistics in ([], [SUM]):
            layer = Layer(text, backend=CpuAttention())
            (out,), _ = layer.step([(Slice(Lane(16, list(range(8))), [0] * 120), text)], statistics)
            outputs.append(out)
        assert torch.equal(*outputs)


class TestMass:
    def test_comes_in_units_and_adds_up(self) -> None:
        text = Text.random(260, num_heads=6, num_kv_heads=3)
        _, drawn = run(text, cuts=[70], backend=CpuAttention())
        assert np.array_equal(drawn * 2.0**28, np.round(drawn * 2.0**28))
        assert drawn.sum() == pytest.approx(260 * 6, abs=1e-3)

    def test_is_added_to_what_is_there(self) -> None:
        text = Text.random(50)
        layer = Layer(text, backend=CpuAttention())
        _, meta = layer.step([(Slice(Lane(16, list(range(4))), [0] * 50), text)], [SUM])
        once = meta.tallies[0].values.copy()
        layer.backend.attend(PLAIN, text.q, text.k, text.v, layer.store.layers[0], meta)
        assert np.array_equal(meta.tallies[0].values, 2 * once)


class TestTallies:
    """Queries that count, and low probabilities, against the plain computation and the oracle."""

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    @pytest.mark.parametrize("first", [0, 57, 130, 171, 199, 200])
    def test_only_queries_from_the_first_on_count(self, spec: AttentionSpec, first: int, isa: str) -> None:
        text = Text.random(200, num_heads=6, deaths=DEATHS)
        arrangement = {"spec": spec, "cuts": [7, 130, 131, 190], "scatter": True, "first": first}
        out, drawn = run(text, **arrangement, statistic=SumLast(3), backend=CpuAttention(isa=isa))
        close((out, drawn), dense(text, spec, first))
        same_out, low = run(text, **arrangement, statistic=CountLow(3), backend=CpuAttention(isa=isa))
        assert torch.equal(same_out, out)
        fewest, most = (dense_low(text, spec, first, slack) for slack in (-1e-4, 1e-4))
        assert ((fewest <= low) & (low <= most)).all()
        assert low.any() == (first < 200 and spec.window != 1), "who sees one token gives it its share"

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("statistic", [SumLast(3), CountLow(3)])
    def test_threads_neighbours_and_blocks_change_nothing(self, statistic: AttentionStatistic, isa: str) -> None:
        text = Text.random(300, num_heads=9, num_kv_heads=3, deaths=DEATHS)
        spec = AttentionSpec(scale=0.25, window=110)
        expected = run(text, spec=spec, statistic=statistic, first=150, backend=CpuAttention(1, isa))
        for threads, neighbours, block_size in ((2, 0, 16), (3, 2, 16), (1, 1, 33)):
            arrangement = {"spec": spec, "neighbours": neighbours, "block_size": block_size}
            backend = CpuAttention(threads, isa)
            assert same(run(text, **arrangement, statistic=statistic, first=150, backend=backend), expected)

    @pytest.mark.parametrize("isa", ISAS)
    def test_equal_shares_are_not_low(self, isa: str) -> None:
        text = Text.random(130, num_heads=6)
        text.q[:] = 0
        for spec in (PLAIN, AttentionSpec(scale=0.25, window=37)):
            _, low = run(text, spec=spec, statistic=CountLow(1), cuts=[50, 51, 120], backend=CpuAttention(isa=isa))
            assert not low.any()

    def test_a_slice_may_want_several(self) -> None:
        text = Text.random(60)
        orders = [make_order(*each) for each in ((Sum(), [0]), (SumLast(9), [0], 51), (CountLow(20), [0], 40))]
        layer = Layer(text, backend=CpuAttention())
        _, meta = layer.step([(Slice(Lane(16, [3, 1, 7, 0]), [0] * 60), text)], orders)
        found = [meta.gathered(each)[0, :60] for each in orders]
        np.testing.assert_allclose(found[0], dense(text, PLAIN)[1], atol=1e-5)
        np.testing.assert_allclose(found[1], dense(text, PLAIN, 51)[1], atol=1e-5)
        assert np.array_equal(found[2], dense_low(text, PLAIN, 40))

    def test_a_slice_that_wants_nothing_gets_nothing(self) -> None:
        text = Text.random(60)
        lanes = Lane(16, [3, 1, 7, 0]), Lane(16, [2, 4, 5, 6])
        parts = [(Slice(lane, [0] * 60), text) for lane in lanes]
        wanted = make_order(Sum(), [1], 20)
        _, meta = Layer(text, backend=CpuAttention()).step(parts, [wanted])
        (tally,) = meta.tallies
        assert not tally.values[0].any()
        np.testing.assert_allclose(tally.values[1, :60], dense(text, PLAIN, 20)[1], atol=1e-5)


def spoiled(text: Text, name: str, position: int, what: float) -> Text:
    """The text with one number of one KV head's key or value replaced."""
    tensor = getattr(text, name).clone()
    tensor[position, 1, 3] = what
    return replace(text, **{name: tensor})


class TestExtremes:
    @pytest.mark.parametrize("isa", ISAS)
    def test_huge_scores_do_not_overflow(self, isa: str) -> None:
        text = Text.random(100, spread=1e4)
        out, _ = run(text, cuts=[30], backend=CpuAttention(isa=isa))
        np.testing.assert_allclose(out, dense(text, PLAIN)[0], atol=1e-2)

    def test_a_score_far_below_another_weighs_nothing(self) -> None:
        text = Text.random(90)
        text.q[:] = 1.0
        text.k[:] = -1e3
        text.k[5] = 1e3
        text.v[[*range(5), *range(6, 90)]] = 3e38  # which any weight but 0 would bring into the result
        out, drawn = run(text, backend=CpuAttention())
        assert torch.equal(out[5:], text.v[5].repeat_interleave(2, dim=0).expand(85, -1, -1))
        assert drawn[5] == 85 * 4

    @pytest.mark.parametrize("isa", ISAS)
    def test_a_key_at_minus_infinity_is_as_good_as_hidden(self, isa: str) -> None:
        text = Text.random(100)
        text.q[:, :, 3] = -text.q[:, :, 3].abs() - 0.1
        text = spoiled(text, "k", 50, torch.inf)
        close(run(text, cuts=[60], backend=CpuAttention(isa=isa)), dense(text, PLAIN))

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("cuts", [[], [100], [60, 65]], ids=["own chunk", "past", "short past"])
    @pytest.mark.parametrize("window", [None, 20])
    @pytest.mark.parametrize("name", ["k", "v"])
    @pytest.mark.parametrize("what", [torch.nan, torch.inf])
    def test_what_is_not_a_number_reaches_only_those_who_see_it(
        self, what: float, name: str, window: int | None, cuts: Sequence[int], isa: str
    ) -> None:
        text, spec = Text.random(200), AttentionSpec(scale=0.25, window=window)
        text.q[:, :, 3] = text.q[:, :, 3].abs() + 0.1  # an infinite key then scores +infinity
        arrangement = {"spec": spec, "cuts": cuts, "scatter": True, "backend": CpuAttention(isa=isa)}
        clean, clean_drawn = run(text, **arrangement)
        out, drawn = run(spoiled(text, name, 90, what), **arrangement)
        sees = np.zeros(200, dtype=bool)
        sees[90 : None if window is None else 90 + window] = True
        assert torch.equal(out[~sees], clean[~sees]), "a query that does not see it was touched"
        assert torch.equal(out[:, :2], clean[:, :2]), "another KV head was touched"
        element = out[sees][:, 2:] if name == "k" else out[sees][:, 2:, 3]
        assert not element.isfinite().any()
        if name == "v":
            assert np.array_equal(drawn, clean_drawn)
        else:
            spread = np.zeros(200, dtype=bool)  # keys of which a query that sees it has a share
            spread[0 if window is None else 90 - window + 1 : None if window is None else 90 + window] = True
            assert np.isnan(drawn[spread]).all()
            assert np.array_equal(drawn[~spread], clean_drawn[~spread])

    def test_a_group_that_fills_more_than_a_panel(self) -> None:
        text, spec = Text.random(60, num_heads=128, num_kv_heads=2), AttentionSpec(scale=0.25)
        text.q[:, :, 3] = text.q[:, :, 3].abs() + 0.1
        clean, _ = run(text, spec=spec, backend=CpuAttention())
        np.testing.assert_allclose(clean, dense(text, spec)[0], atol=2e-5)
        out, _ = run(spoiled(text, "k", 21, torch.inf), spec=spec, backend=CpuAttention())
        assert torch.equal(out[:21], clean[:21])
        assert out[21:, 64:].isnan().all()

    def test_a_query_that_is_not_a_number_stays_alone(self) -> None:
        text = Text.random(100)
        clean, _ = run(text, backend=CpuAttention())
        text.q[41, 2, 0] = torch.nan
        out, drawn = run(text, backend=CpuAttention())
        others = torch.ones(100, 4, dtype=torch.bool)
        others[41, 2] = False
        assert torch.equal(out[others], clean[others])
        assert out[41, 2].isnan().all()
        assert np.array_equal(np.isnan(drawn), np.arange(100) <= 41)

    def test_neighbours_of_a_spoiled_sequence(self) -> None:
        text, other = Text.random(90), Text.random(90, seed=1)
        bad = replace(other, v=torch.full_like(other.v, torch.nan), k=torch.full_like(other.k, torch.nan))
        results = []
        for neighbour in (other, bad):
            layer = Layer(text, backend=CpuAttention())
            lanes = Lane(16, list(range(6))), Lane(16, list(range(6, 12)))
            parts = [(Slice(lane, [0] * 90), whose) for lane, whose in zip(lanes, (text, neighbour), strict=True)]
            (out, _), meta = layer.step(parts, [SUM])
            results.append((out, meta.tallies[0].values[0]))
        assert same(*results)
