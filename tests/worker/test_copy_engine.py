"""`CopyEngine`: ordered copies, swaps, and copies beside the step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from vtoken.memory.copy import Copy, CopyKind
from vtoken.planner.kv_memory import KVShape
from vtoken.worker.copy_engine import CopyEngine
from vtoken.worker.kv_store import KVStore

BLOCK_SIZE = 5


# Torch's indexing and the compiled kernels; formats whose scales have to come along, keys and values apart.
FORMATS_AND_WAYS = [
    (("float32", "float32"), False),
    (("float32", "float32"), True),
    (("int8", "bfloat16"), False),
    (("int8", "bfloat16"), True),
    (("float16", "fp8_e4m3"), True),
]


def new_store(num_blocks: int, seed: int, form: tuple[str, str] = ("float32", "float32")) -> KVStore:
    """A store of random numbers: no two slots are alike."""
    store = KVStore(KVShape(2, 3, 4, *form), num_blocks, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(seed)
    for tensor in store.tensors:
        tensor.copy_(torch.randint(0, 127, tensor.shape, generator=generator))
    return store


def content(store: KVStore) -> torch.Tensor:
    """[slots, everything]: one row a slot, all layers, keys and values and their scales."""
    rows = [tensor.transpose(1, 2).flatten(0, 1).flatten(1) for tensor in store.tensors]
    return torch.cat([row.double() for row in rows], dim=1)


def copy(kind: CopyKind, src: Sequence[int], dst: Sequence[int], ticket: int | None = None) -> Copy:
    return Copy(kind, np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64), ticket)


def blocks(*ids: int) -> list[int]:
    return [block * BLOCK_SIZE + i for block in ids for i in range(BLOCK_SIZE)]


@pytest.fixture(params=FORMATS_AND_WAYS, ids=lambda param: "-".join(map(str, param)))
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    form, compiled = request.param
    engine = CopyEngine(new_store(8, 0, form), new_store(4, 77, form), compiled=compiled)
    yield engine
    engine.close()


@pytest.fixture
def device(engine: CopyEngine) -> KVStore:
    return engine._device


@pytest.fixture
def host(engine: CopyEngine) -> KVStore:
    return engine._host


@pytest.mark.parametrize("kind", [CopyKind.COPY_ON_WRITE, CopyKind.RELOCATE])
def test_slots_move_in_every_layer_and_nothing_else_changes(
    engine: CopyEngine, device: KVStore, kind: CopyKind
) -> None:
    expected = content(device)
    src, dst = [3, 17, 38, 4], [21, 9, 0, 30]
    expected[dst] = expected[src]
    engine.run([copy(kind, src, dst)])
    assert torch.equal(content(device), expected)


def test_copies_run_in_order(engine: CopyEngine, device: KVStore) -> None:
    before = content(device)
    engine.run(
        [copy(CopyKind.RELOCATE, [1], [2]), copy(CopyKind.COPY_ON_WRITE, [2], [11]), copy(CopyKind.RELOCATE, [7], [1])]
    )
    after = content(device)
    assert torch.equal(after[[2, 11, 1]], before[[1, 1, 7]])


def test_swap_out_and_in_brings_blocks_back(engine: CopyEngine, device: KVStore, host: KVStore) -> None:
    before, host_before = content(device), content(host)
    engine.run([copy(CopyKind.SWAP_OUT, blocks(6, 1), blocks(0, 3))])
    assert torch.equal(content(host)[blocks(0, 3)], before[blocks(6, 1)])
    assert torch.equal(content(host)[blocks(1, 2)], host_before[blocks(1, 2)])
    assert torch.equal(content(device), before)
    engine.run([copy(CopyKind.SWAP_IN, blocks(3, 0), blocks(2, 7))])
    assert torch.equal(content(device)[blocks(2, 7)], before[blocks(1, 6)])


def test_a_block_freed_by_swap_may_be_refilled_by_the_next_copy(engine: CopyEngine, device: KVStore) -> None:
    before = content(device)
    engine.run([copy(CopyKind.SWAP_OUT, blocks(1), blocks(0)), copy(CopyKind.RELOCATE, blocks(2), blocks(1))])
    engine.run([copy(CopyKind.SWAP_IN, blocks(0), blocks(5))])
    assert torch.equal(content(device)[blocks(1, 5)], before[blocks(2, 1)])


def test_a_swap_names_whole_blocks(engine: CopyEngine) -> None:
    for slots in ([0, 1, 2], [1, 2, 3, 4, 5], blocks(0)[::-1]):
        with pytest.raises(AssertionError, match="whole blocks"):
            engine.run([copy(CopyKind.SWAP_OUT, slots, slots)])


def test_copies_are_counted_by_kind(engine: CopyEngine, device: KVStore) -> None:
    engine.run([copy(CopyKind.RELOCATE, [1, 2], [8, 9]), copy(CopyKind.RELOCATE, [3], [7])])
    engine.run([copy(CopyKind.SWAP_OUT, blocks(1, 2), blocks(0, 1))])
    assert engine.num_copies[CopyKind.RELOCATE] == 2
    assert engine.bytes_copied[CopyKind.RELOCATE] == 3 * device.shape.bytes_per_token
    assert engine.num_copies[CopyKind.SWAP_OUT] == 1
    assert engine.bytes_copied[CopyKind.SWAP_OUT] == 2 * BLOCK_SIZE * device.shape.bytes_per_token
    assert engine.num_copies[CopyKind.COPY_ON_WRITE] == engine.bytes_copied[CopyKind.SWAP_IN] == 0


class TestBeside:
    @pytest.fixture
    def gate(self, engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        """Beside-copies wait until the gate opens; ordered ones do not."""
        gate, main, run = threading.Event(), threading.current_thread(), engine._copy_slots

        def gated(order: Copy) -> None:
            if threading.current_thread() is not main:
                assert gate.wait(timeout=30)
            run(order)

        monkeypatch.setattr(engine, "_copy_slots", gated)
        yield gate
        gate.set()

    def wait_for(self, engine: CopyEngine, *tickets: int) -> None:
        for ticket in tickets:
            engine._beside[ticket].exception(timeout=30)

    def test_steps_go_on_while_it_runs(self, engine: CopyEngine, device: KVStore, gate: threading.Event) -> None:
        before = content(device)
        engine.run([copy(CopyKind.RELOCATE, [1], [12], ticket=7), copy(CopyKind.RELOCATE, [3], [14])])
        assert engine.poll() == ((), ())
        assert torch.equal(content(device)[[12, 14]], before[[12, 3]])
        gate.set()
        self.wait_for(engine, 7)
        assert engine.poll() == ((7,), ())
        assert engine.poll() == ((), ())
        assert torch.equal(content(device)[[12, 14]], before[[1, 3]])
        assert engine.num_copies[CopyKind.RELOCATE] == 2

    def test_one_at_a_time_in_order(self, engine: CopyEngine, device: KVStore, gate: threading.Event) -> None:
        before = content(device)
        engine.run([copy(CopyKind.RELOCATE, [i], [i + 1], ticket=i) for i in range(6)])
        gate.set()
        self.wait_for(engine, *range(6))
        assert engine.poll() == ((0, 1, 2, 3, 4, 5), ())
        assert torch.equal(content(device)[:7], before[[0] * 7])

    def test_a_failure_surfaces_and_hides_no_other(self, engine: CopyEngine, caplog: pytest.LogCaptureFixture) -> None:
        engine.run([copy(CopyKind.RELOCATE, [1], [10_000], ticket=1), copy(CopyKind.RELOCATE, [1], [2], ticket=2)])
        self.wait_for(engine, 1, 2)
        assert engine.poll() == ((2,), (1,))
        assert "copy 1 beside the steps failed" in caplog.text
        assert engine.poll() == ((), ())

    def test_what_an_ordered_failure_kept_from_starting_is_told(self, engine: CopyEngine) -> None:
        with pytest.raises(IndexError):
            engine.run([copy(CopyKind.RELOCATE, [1], [10_000]), copy(CopyKind.RELOCATE, [1], [2], ticket=5)])
        assert engine.poll() == ((), (5,))

    def test_close_waits_for_the_running_copy(self, engine: CopyEngine, device: KVStore, gate: threading.Event) -> None:
        engine.run([copy(CopyKind.RELOCATE, [1], [12], ticket=7)])
        thread = engine._thread
        assert thread is not None
        gate.set()
        engine.close()
        engine.close()
        assert not any(t.is_alive() for t in thread._threads)
