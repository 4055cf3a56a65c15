"""The compiled kernels against float64, on every instruction set that this processor has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.instruction_sets import ISAS
from tests.linear.weights import GROUP, q4_0_weight, random_weight
from vtoken.kernels import arena
from vtoken.kernels.gemm import PackedWeight, exact_holdings

LOSSLESS = ["f32", "f16", "bf16", "g8", "g4"]
GROUPED = ["g8", "g4"]
# Row counts on both sides of every limit in linear.cpp: tiles of 14 or 6, direct up to 8 or 4, blocks of 256.
ROWS = [0, 1, 2, 4, 5, 6, 7, 8, 9, 13, 14, 15, 28, 29, 61, 255, 257, 513]


def random_rows(num_rows: int, width: int, seed: int = 7) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def exactly(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def assert_float32_close(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """A bound for sums in chunks of 128: well below 128 + in / 128 roundings of the sum of absolute products."""
    size = x.double().abs() @ weight.double().abs().T + 1
    assert ((out - exactly(x, weight, bias)).abs() <= 2**-24 * 12 * size).all()


class TestFloat32Maths:
    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("holding", LOSSLESS)
    def test_equals_float64(self, holding: str, isa: str) -> None:
        for out_features, in_features in ((1, 32), (33, 160), (64, 416)):
            weight, bias = random_weight(out_features, in_features, holding), random_rows(1, out_features)[0]
            packed = PackedWeight(weight, holding, isa)
            for num_rows in ROWS:
                x = random_rows(num_rows, in_features)
                assert_float32_close(packed.multiply(x, bias), x, weight, bias)

    @pytest.mark.parametrize("isa", ISAS)
    @given(st.data())
    @settings(max_examples=25)
    def test_any_shape(self, isa: str, data: st.DataObject) -> None:
        holding = data.draw(st.sampled_from(LOSSLESS))
        width = data.draw(st.integers(1, 300))
        in_features = width // GROUP * GROUP + GROUP if holding in GROUPED else width
        out_features, num_rows = data.draw(st.integers(1, 100)), data.draw(st.integers(0, 40))
        weight = random_weight(out_features, in_features, holding, data.draw(st.integers(0, 99)))
        bias = random_rows(1, out_features)[0] if data.draw(st.booleans()) else None
        x = random_rows(num_rows, in_features + 3)[:, :in_features]  # rows apart in memory
        out = PackedWeight(weight, holding, isa).multiply(x, bias)
        assert_float32_close(out, x, weight, bias)

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("holding", LOSSLESS[1:])
    def test_holdings_give_the_bits_of_float32(self, holding: str, isa: str) -> None:
        weight = random_weight(70, 288, holding)
        narrow, wide = PackedWeight(weight, holding, isa), PackedWeight(weight, "f32", isa)
        for num_rows in (1, 3, 8, 9, 40):
            x = random_rows(num_rows, 288)
            assert torch.equal(narrow.multiply(x), wide.multiply(x))

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("holding", [*LOSSLESS, "int8"])
    def test_rows_do_not_depend_on_neighbours_or_threads(self, holding: str, isa: str) -> None:
        weight, x = random_weight(130, 320, holding), random_rows(600, 320)
        packed = PackedWeight(weight, holding, isa)
        together = packed.multiply(x)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert torch.equal(packed.multiply(x), together)
        finally:
            torch.set_num_threads(before)
        for num_rows in ROWS[1:-1]:
            start = 600 - num_rows  # other places, other neighbours
            assert torch.equal(packed.multiply(x[start:]), together[start:])

    @pytest.mark.parametrize("holding", [*LOSSLESS, "int8"])
    def test_accumulates_into_strided_rows(self, holding: str) -> None:
        for num_rows, out_features in ((1, 64), (3, 41), (20, 64), (20, 41)):
            packed = PackedWeight(random_weight(out_features, 64, holding), holding)
            x, bias = random_rows(num_rows, 64), random_rows(1, out_features)[0]
            whole = random_rows(num_rows, out_features + 5, seed=3)
            before = whole.clone()
            packed.multiply(x, bias, whole[:, :out_features])
            expected = before[:, :out_features] + packed.multiply(x, bias)
            assert torch.equal(whole[:, :out_features], expected)
            assert torch.equal(whole[:, out_features:], before[:, out_features:])

    def test_undefined_numbers_stay_where_they_belong(self) -> None:
        weight, x = random_weight(50, 96, "f32"), random_rows(20, 96)
        weight[13, 5] = float("nan")
        weight[14, 6] = float("inf")
        x[2, 7] = float("nan")
        for num_rows in (3, 20):
            out, expected = PackedWeight(weight, "f32").multiply(x[:num_rows]), exactly(x[:num_rows], weight, None)
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out.isinf(), expected.isinf())
            assert out[0].isnan().sum() == 1


class TestHoldings:
    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("holding", LOSSLESS)
    def test_what_is_exact_is_found_and_given_back(self, holding: str, isa: str) -> None:
        weight = random_weight(67, 96, holding)
        if holding == "bf16":
            weight[0, 0] = 2.0**-100  # or fp16 would do as well
        assert exact_holdings(weight, isa) == {"f32", holding}
        packed = PackedWeight(weight, holding, isa)
        ids = torch.tensor([66, 0, 31, 32, 66])
        assert torch.equal(packed.rows(ids), weight[ids])

    def test_q4_0_is_exact_in_g4(self) -> None:
        weight = q4_0_weight(40, 128)
        assert "g4" in exact_holdings(weight)
        assert torch.equal(PackedWeight(weight, "g4").rows(torch.arange(40)), weight)

    @pytest.mark.parametrize("holding", LOSSLESS[1:])
    def test_one_number_off_is_noticed(self, holding: str) -> None:
        weight = random_weight(40, 96, holding)
        weight[39, 95] *= 1 + 2**-20
        assert holding not in exact_holdings(weight)

    @pytest.mark.parametrize("holding", GROUPED)
    def test_groups_must_be_whole_and_of_that_form(self, holding: str) -> None:
        with pytest.raises(ValueError, match="groups of 32"):
            PackedWeight(torch.ones(3, 53), holding)
        with pytest.raises(ValueError, match="2 groups of 32 weights are not"):
            PackedWeight(random_weight(2, 32, "f32"), holding)

    def test_constant_and_zero_groups(self) -> None:
        weight = torch.zeros(3, 64)
        weight[1] = 0.75
        assert exact_holdings(weight) == {"f32", "f16", "bf16", "g4"}  # 0.75 / 127 is no fp16 scale

    def test_undefined_numbers_are_exact_in_float32_only(self) -> None:
        weight = random_weight(4, 64, "g4")
        weight[2, 3] = float("nan")
        assert exact_holdings(weight) == {"f32"}

    def test_bytes(self) -> None:
        per_weight = {h: PackedWeight(random_weight(256, 320, h), h).nbytes / (256 * 320) for h in [*LOSSLESS, "int8"]}
        assert per_weight == {"f32": 4, "f16": 2, "bf16": 2, "g8": 1.0625, "g4": 0.625, "int8": 1.0625}


class TestInt8:
    @pytest.mark.parametrize("isa", ISAS)
    def test_error_is_that_of_codes(self, isa: str) -> None:
        for out_features, in_features in ((7, 53), (100, 576)):
            weight, bias = random_weight(out_features, in_features, "f32"), random_rows(1, out_features)[0]
            packed = PackedWeight(weight, "int8", isa)
            held = packed.rows(torch.arange(out_features))
            padded = torch.nn.functional.pad
            tail = -in_features % GROUP
            largest = padded(weight, (0, tail)).unflatten(1, (-1, GROUP)).abs().amax(-1)
            # Half a step, and the scale rounded to fp16.
            step = (largest / 127).repeat_interleave(GROUP, 1)[:, :in_features]
            assert ((held - weight).abs() <= step * (0.5 + 127 * 2**-10)).all()
            x = random_rows(40, in_features)
            steps = padded(x, (0, tail)).unflatten(1, (-1, GROUP)).abs().amax(-1) / 127
            x_step = steps.repeat_interleave(GROUP, 1)[:, :in_features]
            bound = 0.5001 * x_step.double() @ held.double().abs().T + 1e-4
            for num_rows in (1, 2, 3, 5, 6, 7, 40):
                error = (packed.multiply(x[:num_rows], bias) - exactly(x[:num_rows], held, bias)).abs()
                assert (error <= bound[:num_rows]).all()

    @pytest.mark.parametrize("isa", ISAS)
    def test_extreme_codes_do_not_saturate(self, isa: str) -> None:
        weight = torch.full((40, 64), 2.0) * torch.tensor([1.0, -1.0]).repeat(20)[:, None]
        x = torch.full((3, 64), -5.0)
        out = PackedWeight(weight, "int8", isa).multiply(x)
        torch.testing.assert_close(out, x @ weight.T, rtol=2e-3, atol=0)

    def test_weights_that_are_codes_already_do_not_change(self) -> None:
        weight = random_weight(40, 64, "g8")
        assert torch.equal(PackedWeight(weight, "int8").rows(torch.arange(40)), weight)

    def test_rows_of_zeros_outliers_and_undefined_numbers(self) -> None:
        weight, x = random_weight(40, 64, "f32"), random_rows(5, 64)
        packed = PackedWeight(weight, "int8")
        plain = packed.multiply(x)
        x[1] = 0
        x[2, 3] = 1e30
        x[3, 4] = float("nan")
        x[4, 5] = float("inf")
        out = packed.multiply(x)
        assert torch.equal(out[0], plain[0])
        assert (out[1] == 0).all()
        torch.testing.assert_close(out[2], 1e30 * packed.rows(torch.arange(40))[:, 3], rtol=1e-3, atol=1e26)
        assert out[3:].isnan().all()

    def test_tiny_activations(self) -> None:
        out = PackedWeight(random_weight(8, 64, "f32"), "int8").multiply(torch.full((2, 64), 1e-44))
        assert (out.abs() < 1e-40).all()

    def test_weights_too_large_for_a_scale(self) -> None:
        with pytest.raises(ValueError, match="what int8 can hold"):
            PackedWeight(torch.full((2, 32), 1e9), "int8")


class TestArena:
    def test_pieces_are_aligned_zeroed_and_apart(self) -> None:
        pieces = [arena.allocate(nbytes) for nbytes in (1, 64, 1000, arena.CHUNK + 1, 5)]
        for number, piece in enumerate(pieces, 1):
            assert piece.data_ptr() % arena.ALIGNMENT == 0
            assert not piece.any()
            piece.fill_(number)
        assert [len(piece) for piece in pieces] == [1, 64, 1000, arena.CHUNK + 1, 5]
        assert all((piece == number).all() for number, piece in enumerate(pieces, 1))

    def test_memory_is_given_back_with_the_last_piece(self) -> None:
        first = arena.allocate(2 * arena.CHUNK)  # larger than any chunk there is
        chunk = arena._chunk
        second = arena.allocate(8)  # behind it: chunks are whole huge pages
        assert chunk is not None
        assert second.data_ptr() - first.data_ptr() == first.nbytes + arena.PADDING
        del first
        assert chunk() is not None
        del second
        assert chunk() is None
