from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken import ConfigError
from vtoken.base.config import EngineConfig
from vtoken.planner.kv_memory import KVPlan, KVShape, blocks_for, default_kv_bytes, largest_model_len, plan_kv

MIB, GIB = 1024**2, 1024**3
LLAMA_8B = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, key_dtype="bfloat16")


def _plan(available: int = 8 * GIB, model_max_len: int = 131_072, shape: KVShape = LLAMA_8B, **settings: Any) -> KVPlan:
    return plan_kv(EngineConfig(model="m", **settings), shape, model_max_len, available)


def test_the_pool_holds_exactly_what_fits() -> None:  # U25
    assert _plan(kv_memory="32MiB", max_model_len="auto").num_blocks == 16
    assert _plan(kv_memory=32 * MIB - 1, max_model_len="auto").num_blocks == 15
    assert _plan(num_blocks=7, max_model_len="auto").num_blocks == 7


def test_without_a_size_the_pool_takes_half_and_at_most_4_gib() -> None:
    assert default_kv_bytes(2 * GIB) == GIB
    assert default_kv_bytes(100 * GIB) == 4 * GIB
    assert _plan(available=2 * GIB, max_model_len="auto").num_blocks == GIB // (2 * MIB)


def test_a_longer_model_never_moves_the_pool() -> None:  # U25
    sizes = [_plan(max_model_len=length).num_blocks for length in range(1024, 32_768, 1024)]
    assert len(set(sizes)) == 1


def test_swap_space_is_cut_to_the_pool() -> None:  # R15
    swap = {"preemption": "swap", "max_model_len": "auto"}
    assert _plan(num_blocks=100, swap_space="64MiB", **swap).num_host_blocks == 32
    assert _plan(num_blocks=10, swap_space="64MiB", **swap).num_host_blocks == 10


def test_a_length_beyond_the_pool_is_refused_and_the_largest_that_fits_works() -> None:  # U47
    pool = {"kv_memory": "16MiB"}
    with pytest.raises(ConfigError) as caught:
        _plan(max_model_len=131_072, **pool)
    message = str(caught.value)
    assert f"max_model_len=131072 needs {16 * GIB} bytes (16 GiB)" in message
    assert f"{16 * MIB} bytes (16 MiB)" in message
    found = re.search(r"largest length that fits is (\d+)", message)
    assert found is not None
    largest = int(found[1])
    assert _plan(max_model_len=largest, **pool).max_model_len == largest
    with pytest.raises(ConfigError):
        _plan(max_model_len=largest + 16, **pool)
    assert _plan(max_model_len="auto", **pool).max_model_len == largest


def test_none_means_the_models_own_length() -> None:
    assert _plan(model_max_len=2048).max_model_len == 2048
    assert _plan(model_max_len=2048, max_model_len="auto").max_model_len == 2048
    with pytest.raises(
        ConfigError, match=r"^the model's own max_model_len, 131072, needs .*\(2 MiB\) in 1 blocks.*'auto' \(gives 16\)"
    ):
        _plan(num_blocks=1)


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=4096 is beyond the 2048 positions"):
        _plan(model_max_len=2048, max_model_len=4096)


def test_beyond_the_model_and_the_pool_both_reasons_are_said() -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(model_max_len=2048, max_model_len=4096, num_blocks=8)
    message = str(caught.value)
    assert "is beyond the 2048 positions" in message
    assert "needs 536870912 bytes (512 MiB)" in message
    assert "largest length that fits is 128. Set max_model_len to 128 or 'auto'" in message


def test_a_pool_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"kv_memory=100 gives 100 bytes, but one block of 16 tokens takes {2 * MIB}"):
        _plan(kv_memory=100)
    with pytest.raises(ConfigError, match="the default size of the KV pool gives 1048576 bytes"):
        _plan(available=2 * MIB)


@pytest.mark.parametrize(
    ("settings", "pool", "swap"),
    [
        ({"num_blocks": 4097}, 4097, 0),
        ({"num_blocks": 4000, "swap_space": 200 * MIB, "preemption": "swap"}, 4000, 100),
    ],
)
def test_more_than_the_host_can_hold_is_refused_with_both_numbers(settings: Any, pool: int, swap: int) -> None:  # U84
    with pytest.raises(ConfigError) as caught:
        _plan(**settings)
    assert f"pool of {pool} blocks and {swap} more of swap space need {(pool + swap) * 2 * MIB} bytes" in str(
        caught.value
    )
    assert f"{8 * GIB} bytes (8 GiB) of memory available" in str(caught.value)


def test_the_default_pool_leaves_room_for_the_swap_space() -> None:
    plan = _plan(available=2 * GIB, max_model_len="auto", swap_space="1GiB", preemption="swap")
    assert plan.num_blocks * 2 * MIB == GIB // 2


@given(st.integers(1, 10**6), st.sampled_from([4, 5, 7, 16, 48, 256]))
def test_lengths_and_blocks_agree(num_tokens: int, block_size: int) -> None:
    blocks = blocks_for(num_tokens, block_size)
    assert largest_model_len(blocks - 1, block_size) < num_tokens <= largest_model_len(blocks, block_size)
