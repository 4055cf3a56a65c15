"""Candidates of every origin behind one interface, and the choice between them."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch

from tests.linear.weights import random_weight
from vtoken.base.errors import ConfigError
from vtoken.linear import KERNELS, LinearKernel, LinearShape, PreparedLinear, choose, shape_of
from vtoken.linear import measure as measuring
from vtoken.linear.choose import best

SHAPE = LinearShape(64, 96, False, torch.float32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measurements of a test are its own; the compiled kernels stay where they are."""
    monkeypatch.setattr(measuring, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    monkeypatch.setattr(measuring, "MAX_SPREAD", float("inf"))
    monkeypatch.setattr(measuring, "FLUSH_BYTES", 4096)
    monkeypatch.setattr(sys.modules["vtoken.linear.choose"], "WORTH_TIMING", 0)
    return tmp_path / "linear"


def available(name: str) -> LinearKernel:
    kernel = KERNELS[name]
    if reason := kernel.unavailable():
        pytest.skip(reason)
    return kernel


class TestCandidates:
    @pytest.mark.parametrize("name", sorted(KERNELS))
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_computes_a_linear_layer(self, name: str, has_bias: bool) -> None:
        kernel = available(name)
        torch.manual_seed(0)
        for out_features, in_features in ((7, 53), (1, 1), (96, 64)):
            if kernel.holding in ("g8", "g4") and in_features % 32:
                continue
            weight = random_weight(out_features, in_features, kernel.holding)
            bias = torch.randn(out_features) if has_bias else None
            linear = kernel.prepare(weight, bias)
            assert (linear.in_features, linear.out_features) == (in_features, out_features)
            for num_rows in (0, 1, 5, 33):
                x = torch.randn(num_rows, in_features)
                out = linear(x)
                expected = torch.nn.functional.linear(
                    x.double(), weight.double(), None if bias is None else bias.double()
                )
                assert out.shape == expected.shape
                assert out.dtype == torch.float32
                # In units of the result's standard deviation, sqrt(in).
                tolerance = (0.1 if kernel.holding == "int8" else 1e-5) * in_features**0.5
                assert ((out - expected).abs() <= tolerance).all()

    @pytest.mark.parametrize("name", sorted(KERNELS))
    def test_claim_of_batch_invariance(self, name: str) -> None:
        kernel = available(name)
        linear = kernel.prepare(random_weight(96, 64, kernel.holding), None)
        x = torch.randn(100, 64)
        same = all(torch.equal(linear(x[:rows]), linear(x)[:rows]) for rows in (1, 2, 7, 16, 50))
        assert same or not kernel.batch_invariant

    @pytest.mark.parametrize("name", sorted(KERNELS))
    def test_rows_of_an_embedding(self, name: str) -> None:
        kernel = available(name)
        weight = random_weight(96, 64, kernel.holding)
        linear = kernel.prepare(weight, None)
        ids = torch.tensor([95, 0, 33])
        if linear.has_rows:
            torch.testing.assert_close(linear.rows(ids), weight[ids], rtol=0, atol=0.02 if "int8" in name else 0)
        else:
            with pytest.raises(NotImplementedError, match="cannot give rows"):
                linear.rows(ids)

    @pytest.mark.parametrize("name", ["fbgemm_int8", "vtoken_int8"])
    def test_int8_refuses_what_it_cannot_hold(self, name: str) -> None:
        weight = torch.ones(96, 64)
        weight[3, 4] = float("inf")
        with pytest.raises(ConfigError, match="64 -> 96 has infinite or undefined numbers"):
            available(name).prepare(weight, None)

    def test_grouped_refuses_other_weights(self) -> None:
        with pytest.raises(ConfigError, match="vtoken_g4 cannot hold a linear layer 64 -> 96"):
            available("vtoken_g4").prepare(random_weight(96, 64, "f32"), None)

    def test_bytes_held(self) -> None:
        weight, bias = torch.zeros(96, 64), torch.zeros(96)
        assert KERNELS["torch"].prepare(weight, bias).nbytes == 96 * 64 * 4 + 96 * 4
        assert available("vtoken_f16").prepare(weight, None).nbytes == 96 * 64 * 2


class TestShapes:
    def test_finds_what_is_exact(self) -> None:
        shape = shape_of(random_weight(96, 64, "f16"), torch.zeros(96))
        assert (shape.in_features, shape.out_features, shape.has_bias) == (64, 96, True)
        assert {"f32", "f16"} <= shape.exact
        assert str(shape) == "64 -> 96"
        assert "f16" not in shape_of(random_weight(96, 64, "f32"), None).exact

    def test_other_dtypes_are_torch_s(self) -> None:
        shape = shape_of(torch.zeros(96, 64, dtype=torch.bfloat16), None)
        plan = choose([shape])
        assert plan.kernels[shape].name == "torch"
        linear = plan.prepare(torch.ones(96, 64, dtype=torch.bfloat16), None, shape)
        assert linear(torch.ones(1, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


class TestChoice:
    def test_never_rounds_unasked(self) -> None:
        plan = choose([SHAPE])
        assert plan.timings[SHAPE].keys() <= {"torch", "onednn", "vtoken_f32"}
        half = LinearShape(64, 96, False, torch.float32, frozenset({"f32", "f16"}))
        measured = choose([half]).timings[half].keys()
        assert not any("int8" in name or "bf16" in name or "g4" in name for name in measured)
        if KERNELS["vtoken_f16"].unavailable() is None:
            assert "vtoken_f16" in measured

    def test_small_layers_are_not_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.modules["vtoken.linear.choose"], "WORTH_TIMING", 64 * 96 + 1)
        available("vtoken_g4")
        small = LinearShape(64, 96, False, torch.float32, frozenset({"f32", "f16", "g8", "g4"}))
        plan = choose([SHAPE, small])
        assert not plan.timings
        assert plan.kernels[small].name == "vtoken_g4"
        assert plan.kernels[SHAPE].holding == "f32"

    def test_by_name(self) -> None:
        for name in ("torch", "onednn"):
            plan = choose([SHAPE], override=name)
            assert plan.kernels[SHAPE].name == name
            assert plan.summary() == [f"linear 64 -> 96: {name}"]
            assert not plan.timings

    def test_a_name_may_ask_for_rounding(self) -> None:
        available("vtoken_f16")
        assert choose([SHAPE], override="vtoken_f16").kernels[SHAPE].holding == "f16"

    def test_own_kernels_only(self) -> None:
        available("vtoken_f32")
        assert choose([SHAPE], override="vtoken").kernels[SHAPE].name == "vtoken_f32"

    def test_what_a_kernel_cannot_do_is_torch_s_and_said(self, caplog: pytest.LogCaptureFixture) -> None:
        available("vtoken_g4")
        with caplog.at_level(logging.WARNING, "vtoken"):
            plan = choose([SHAPE], override="vtoken_g4")
        assert plan.kernels[SHAPE].name == "torch"
        assert "64 -> 96: computed by torch, since vtoken_g4 holds only weights" in caplog.text

    def test_int8_is_the_user_s(self) -> None:
        assert choose([SHAPE], quantization="int8").kernels[SHAPE].holding == "int8"

    def test_last_resort(self, monkeypatch: pytest.MonkeyPatch) -> None:
        available("vtoken_int8")
        available("fbgemm_int8")
        assert choose([SHAPE], quantization="int8").kernels[SHAPE].name == "vtoken_int8"
        assert choose([SHAPE], override="fbgemm_int8", quantization="int8").kernels[SHAPE].name == "fbgemm_int8"
        monkeypatch.setattr(type(KERNELS["vtoken_int8"]), "unavailable", lambda self: "no C++ compiler was found")
        assert choose([SHAPE], quantization="int8").kernels[SHAPE].name == "fbgemm_int8"

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"override": "onedn"}, "unknown linear_backend 'onedn'; did you mean 'onednn'"),
            ({"override": "auto", "quantization": "int4"}, "unknown quantization 'int4'; known: int8"),
            (
                {"override": "torch", "quantization": "int8"},
                "linear_backend='torch' holds f32 weights, which contradicts",
            ),
            ({"override": "vtoken_int8"}, "set quantization='int8'"),
        ],
    )
    def test_bad_settings(self, settings: dict[str, str], message: str) -> None:
        if settings["override"] == "vtoken_int8":
            available("vtoken_int8")
        with pytest.raises(ConfigError, match=message):
            choose([SHAPE], **settings)

    def test_unavailable_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(KERNELS["onednn"]), "unavailable", lambda self: "torch was built without oneDNN")
        with pytest.raises(ConfigError, match="'onednn' cannot run here: torch was built without oneDNN"):
            choose([SHAPE], override="onednn")
        assert "onednn" not in choose([SHAPE]).timings.get(SHAPE, {})

    def test_score(self) -> None:
        even = dict.fromkeys(measuring.ROW_COUNTS, 10.0)
        assert best({"a": even, "b": {**even, 1: 5.0}, "c": {**even, 8: 11.0}}) == "b"
        # Twice as quick at one count weighs as much as half as quick at another.
        assert best({"a": {**even, 1: 5.0, 512: 21.0}, "b": even}) == "b"


class TestMeasurements:
    def test_are_made_once(self, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = choose([SHAPE])
        (path,) = own_cache.iterdir()
        monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("measured again"))
        assert choose([SHAPE]).timings == first.timings
        assert "us at 1, " in first.summary()[0]
        path.write_text(json.dumps({}))
        with pytest.raises(pytest.fail.Exception):
            choose([SHAPE])

    @pytest.mark.parametrize("damage", ["", "[]", '{"64x96": 3}', '{"64x96": {"torch": {"1": 2}}}'])
    def test_a_damaged_file_is_measured_anew(self, own_cache: Path, damage: str) -> None:
        choose([SHAPE])
        (path,) = own_cache.iterdir()
        path.write_text(damage)
        assert choose([SHAPE]).timings[SHAPE].keys() == choose([SHAPE]).timings[SHAPE].keys()
        assert len(json.loads(path.read_text())) == 1

    def test_depend_on_the_machine(self, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        choose([SHAPE])
        monkeypatch.setattr(measuring, "machine_id", lambda: "another")
        choose([SHAPE])
        assert len(list(own_cache.iterdir())) == 2

    def test_leave_the_number_of_threads(self) -> None:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            choose([SHAPE])
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)

    def test_are_not_kept_from_a_busy_machine(
        self, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(measuring, "MAX_SPREAD", 0.5)
        assert choose([SHAPE]).timings
        assert not own_cache.exists()
        assert "timed again at the next start" in caplog.text

    def test_a_cache_that_cannot_be_written(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setattr(measuring, "cache_dir", lambda: tmp_path / "file")
        assert choose([SHAPE]).kernels
        assert "cannot be kept" in caplog.text

    def test_every_kernel_can_be_measured(self) -> None:
        shape = LinearShape(64, 96, True, torch.float32, frozenset({"f32", "f16", "bf16", "g8", "g4"}))
        if KERNELS["vtoken_f32"].unavailable() is None:
            weight = measuring.sample_weight(96, 64, torch.float32)
            assert shape_of(weight, None).exact == shape.exact
        names = {name for name, kernel in KERNELS.items() if kernel.unavailable() is None and kernel.holding != "int8"}
        assert choose([shape]).timings[shape].keys() == names

    def test_large_layers_are_timed_in_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []

        class Watched(LinearKernel):
            name, holding = "watched", "f32"

            def unavailable(self) -> None:
                return None

            def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
                seen.append(len(weight))
                return KERNELS["torch"].prepare(weight, bias)

        monkeypatch.setattr(measuring, "ROW_COUNTS", (1,))
        monkeypatch.setattr(measuring, "MAX_WEIGHTS", 64 * 128)
        measuring.measure(LinearShape(64, 1000, True, torch.float32), [Watched()], [])
        assert seen == [128]
