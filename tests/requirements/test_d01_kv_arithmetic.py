"""D1-D2: bytes = layers x 2 x batch x kv_heads x seq x head_dim x dtype. R1: the same for OPT-13B."""

from __future__ import annotations

from vtoken.planner.kv_memory import KVShape

LLAMA_8B = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, key_dtype="bfloat16")


def test_bytes_a_token() -> None:
    assert LLAMA_8B.bytes_per_token == 131_072
    assert KVShape(num_layers=40, num_kv_heads=40, head_dim=128, key_dtype="bfloat16").bytes_per_token == 819_200


def test_bytes_of_a_sequence_and_of_a_batch() -> None:
    assert LLAMA_8B.bytes_for(4096) == 512 * 1024**2
    assert LLAMA_8B.bytes_for(4096, batch=32) == 16 * 1024**3


def test_blocks_in_a_budget() -> None:
    # P1: (0.9 x 80e9 - 16.06e9) / 131,072 = 426,788 tokens, 26,674 blocks of 16.
    budget = 9 * 80_000_000_000 // 10 - 16_060_000_000
    assert budget // LLAMA_8B.bytes_per_token == 426_788
    assert LLAMA_8B.blocks_in(budget, block_size=16) == 26_674
    assert LLAMA_8B.bytes_per_block(16) == 2 * 1024**2
