"""The reference backend: right against float64, and the same bits however the tokens are laid out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.layer import PLAIN, SUM, Layer, Text, dense, dense_low, run
from tests.plans import Lane, Slice
from tests.plans import order as make_order
from tests.strategies import deaths
from vtoken.attention.spec import AttentionSpec
from vtoken.policies.statistics import CountLow, Sum, SumLast

DEATHS = {40: [0, 3, 17, 39], 100: [1, 2, *range(50, 90)], 180: [4, 99, 100, 150]}

SPECS = {
    "plain": PLAIN,
    "window": AttentionSpec(scale=0.25, window=37),
    "window of one": AttentionSpec(scale=0.25, window=1),
    "soft cap": AttentionSpec(scale=0.25, soft_cap=1.5),
    "window and soft cap": AttentionSpec(scale=0.1, window=150, soft_cap=5.0),
}


class TestValues:
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    @pytest.mark.parametrize("deaths", [{}, DEATHS], ids=["alive", "evicted"])
    def test_equals_dense_softmax(self, spec: AttentionSpec, deaths: dict[int, list[int]]) -> None:
        text = Text.random(200, deaths=deaths)
        out, drawn = run(text, cuts=[7, 130, 131, 132], spec=spec, scatter=True, neighbours=2)
        expected, expected_drawn = dense(text, spec)
        np.testing.assert_allclose(out.numpy(), expected, atol=2e-6)
        np.testing.assert_allclose(drawn, expected_drawn, atol=1e-4)

    @pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 8, 8), (8, 4, 80), (8, 1, 64), (3, 1, 20)])
    def test_grouped_heads(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        text = Text.random(50, num_heads, num_kv_heads, head_dim)
        out, _ = run(text, cuts=[20], block_size=8)
        np.testing.assert_allclose(out.numpy(), dense(text, PLAIN)[0], atol=1e-5)

    def test_huge_scores_do_not_overflow(self) -> None:
        text = Text.random(40, spread=1e4)
        out, _ = run(text, cuts=[30])
        np.testing.assert_allclose(out.numpy(), dense(text, PLAIN)[0], atol=1e-2)

    def test_a_slice_may_read_what_another_writes_in_the_same_plan(self) -> None:
        text = Text.random(40)
        layer = Layer(text, block_size=16, spec=PLAIN)
        first = Lane(16, [5, 9, 2])
        # The second sequence has the same first 32 tokens: it matched blocks 5 and 9, which this very plan fills.
        second = Lane(16, [5, 9, 7], past={row: row for row in range(32)})
        whole = Slice(first, [0] * 40, first_position=0)
        (out, tail), _ = layer.step([(Slice(second, [0] * 8), text), (whole, text)][::-1])
        assert torch.equal(tail, out[32:])
        np.testing.assert_allclose(out.numpy(), dense(text, PLAIN)[0], atol=2e-6)


class TestBits:
    """Exact equality. The lone run in one chunk, blocks of 16, tokens in order, is what all others are held to."""

    @pytest.mark.parametrize(
        ("spec", "deaths"),
        [(PLAIN, {}), *((spec, DEATHS) for spec in SPECS.values())],
        ids=["alive", *(f"evicted-{name}" for name in SPECS)],
    )
    def test_chunks(self, spec: AttentionSpec, deaths: dict[int, list[int]]) -> None:
        text = Text.random(300, deaths=deaths)
        expected, expected_drawn = run(text, spec=spec)
        for cuts in (range(1, 300), range(5, 300, 7), [129], [16, 17, 200, 290]):
            out, drawn = run(text, cuts=cuts, spec=spec)
            assert torch.equal(out, expected)
            assert np.array_equal(drawn, expected_drawn), "chunks changed the statistics"

    @pytest.mark.parametrize("block_size", [4, 5, 7, 16, 31, 32, 33, 48, 64, 100, 256])
    def test_block_sizes_and_places(self, block_size: int) -> None:
        text = Text.random(200, deaths=DEATHS)
        expected, expected_drawn = run(text)
        out, drawn = run(text, block_size=block_size, scatter=True, cuts=[33, 150], seed=block_size)
        assert torch.equal(out, expected)
        assert np.array_equal(drawn, expected_drawn)

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim"),
        [(1, 1, 8), (9, 3, 64), (8, 1, 80), (8, 8, 128), (6, 2, 17), (5, 5, 96)],
    )
    def test_head_shapes_with_neighbours(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        text = Text.random(150, num_heads, num_kv_heads, head_dim, deaths={60: list(range(5, 50, 3))})
        expected, _ = run(text)
        for neighbours, cuts in ((0, [1, 2, 3, *range(120, 140)]), (3, range(125, 135)), (1, [75])):
            out, _ = run(text, cuts=cuts, neighbours=neighbours, scatter=True, block_size=12, seed=neighbours)
            assert torch.equal(out, expected)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_kv_of_fewer_bits(self, dtype: torch.dtype) -> None:
        text = Text.random(150, deaths={60: list(range(5, 50, 3))})
        expected, _ = run(text, dtype=dtype)
        out, _ = run(text, dtype=dtype, cuts=range(20, 150), scatter=True, block_size=5)
        assert torch.equal(out, expected)

    @settings(max_examples=30)
    @given(data=st.data())
    def test_anything_goes(self, data: st.DataObject) -> None:
        num_tokens = data.draw(st.integers(1, 280), label="tokens")
        places = st.sets(st.integers(1, num_tokens), max_size=4)
        dead = data.draw(deaths(num_tokens), label="deaths")
        text = Text.random(num_tokens, deaths=dead)
        spec = data.draw(st.sampled_from(list(SPECS.values())), label="spec")
        expected, expected_drawn = run(text, spec=spec)
        out, drawn = run(
            text,
            spec=spec,
            cuts=sorted(data.draw(places, label="cuts")),
            block_size=data.draw(st.integers(4, 64), label="block size"),
            scatter=data.draw(st.booleans(), label="scatter"),
            neighbours=data.draw(st.integers(0, 2), label="neighbours"),
            seed=data.draw(st.integers(0, 99), label="seed"),
        )
        assert torch.equal(out, expected)
        assert np.array_equal(drawn, expected_drawn)

    @pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="emulates an AVX2 machine")
    @pytest.mark.skipif("VTOKEN_TEST_AVX2" in os.environ, reason="already inside")
    def test_on_the_code_paths_of_an_avx2_machine(self) -> None:
        """There a product of one shape gives other bits when a row moves, which AVX-512 does not show. Windows and caps
        come after the products: once is enough for them."""
        env = os.environ | {
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "VTOKEN_TEST_AVX2": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"{__file__}::TestBits"]
        command += ["-k", "not evicted-window and not evicted-soft"]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:]


class TestStatistics:
    def test_every_query_head_hands_out_one(self) -> None:
        text = Text.random(90, num_heads=6, num_kv_heads=3, deaths={30: [0, 5]})
        _, drawn = run(text, cuts=[64])
        assert drawn.sum() == pytest.approx(90 * 6, abs=1e-4)

    def test_a_planted_heavy_hitter_draws_the_most(self) -> None:
        text = Text.random(120)
        direction = torch.ones(text.q.shape[2])
        text.q += direction
        text.k[37] = 3 * direction
        _, drawn = run(text, cuts=[60])
        assert drawn.argmax() == 37
        np.testing.assert_allclose(drawn, dense(text, PLAIN)[1], atol=1e-4)

    def test_layers_add_up(self) -> None:
        text = Text.random(30)
        layer = Layer(text, spec=PLAIN)
        lane = Lane(16, [3, 1])
        _, meta = layer.step([(Slice(lane, [0] * 30), text)], [SUM])
        once = meta.tallies[0].values.copy()
        layer.backend.attend(PLAIN, text.q, text.k, text.v, layer.store.layers[0], meta)
        assert np.array_equal(meta.tallies[0].values, 2 * once)

    def test_nothing_is_collected_unasked(self) -> None:
        text = Text.random(30)
        _, meta = Layer(text).step([(Slice(Lane(16, [3, 1]), [0] * 30), text)])
        assert not meta.tallies

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    @pytest.mark.parametrize("first", [0, 57, 130, 171, 199, 200])
    def test_only_queries_from_the_first_on_count(self, spec: AttentionSpec, first: int) -> None:
        text = Text.random(200, deaths=DEATHS)
        settings = {"spec": spec, "cuts": [7, 130, 131, 190], "scatter": True, "first": first}
        _, drawn = run(text, **settings, statistic=SumLast(3))
        np.testing.assert_allclose(drawn, dense(text, spec, first)[1], atol=1e-4)
        _, low = run(text, **settings, statistic=CountLow(3))
        fewest, most = (dense_low(text, spec, first, slack) for slack in (-1e-5, 1e-5))
        assert ((fewest <= low) & (low <= most)).all()
        assert low.any() == (first < 200 and spec.window != 1), "who sees one token gives it its share"

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_low_counts_do_not_depend_on_chunks_and_places(self, spec: AttentionSpec) -> None:
        text = Text.random(200, deaths=DEATHS)
        _, expected = run(text, spec=spec, statistic=CountLow(3), first=33)
        _, low = run(
            text, spec=spec, statistic=CountLow(3), first=33, cuts=range(3, 200, 7), scatter=True, neighbours=2
        )
        assert np.array_equal(low, expected)

    def test_equal_shares_are_not_low(self) -> None:
        """Whatever the number of tokens: a probability of 1 / t is not below 1 / t."""
        text = Text.random(90)
        text.q[:] = 0
        _, low = run(text, statistic=CountLow(1), cuts=[50])
        assert not low.any()

    def test_a_slice_may_want_several(self) -> None:
        text = Text.random(60)
        orders = [make_order(*each) for each in ((Sum(), [0]), (SumLast(9), [0], 51), (CountLow(20), [0], 40))]
        _, meta = Layer(text).step([(Slice(Lane(16, [3, 1, 7, 0]), [0] * 60), text)], orders)
        found = [meta.gathered(each)[0, :60] for each in orders]
        np.testing.assert_allclose(found[0], dense(text, PLAIN)[1], atol=1e-5)
        np.testing.assert_allclose(found[1], dense(text, PLAIN, 51)[1], atol=1e-5)
        assert np.array_equal(found[2], dense_low(text, PLAIN, 40))
