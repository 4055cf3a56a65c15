from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vtoken import ConfigError
from vtoken.base import host_memory
from vtoken.base.config import EngineConfig

GIB = 1024**3


@pytest.fixture(autouse=True)
def _eight_gib_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 8 * GIB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("model", bad) for bad in ("", 5, None)],
        *[("block_size", bad) for bad in (3, 257, 16.0, "16", True, None)],
        *[("num_blocks", bad) for bad in (0, -1, 1.5, "8", True, 2**31)],
        *[("kv_memory", bad) for bad in (0, -1, 1.5, True, "much", "512Mi", "-1GB", "0.3B", 2**63)],
        *[("swap_space", bad) for bad in (-1, 0.5, None, "some", True)],
        *[("max_model_len", bad) for bad in (0, "big", 1.5, True)],
        *[("max_num_seqs", bad) for bad in (0, None, "1")],
        *[("max_num_batched_tokens", bad) for bad in (0, None, 1.0)],
        *[("dtype", bad) for bad in ("int8", None, 32)],
        *[("preemption", bad) for bad in ("drop", None, True)],
        *[("attention_backend", bad) for bad in ("", None)],
        *[("enable_prefix_caching", bad) for bad in (1, "yes", None)],
        *[("seed", bad) for bad in (2**64, 0.5)],
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", field: value})
    assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


def test_the_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="^model: missing; expected a checkpoint folder"):
        EngineConfig()  # type: ignore[call-arg]


def test_a_misspelt_setting_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"^block_sise: unknown engine setting; did you mean 'block_size'\?"):
        EngineConfig(model="m", block_sise=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu_memory_utilization", "set kv_memory="),
        ("num_gpu_blocks_override", "called num_blocks here"),
        ("tensor_parallel_size", "not there yet"),
    ],
)
def test_a_setting_of_vllm_is_answered_by_what_there_is(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", name: 1})
    assert str(caught.value).startswith(f"{name}: ")
    assert said in str(caught.value)


def test_paths_and_sizes_are_taken_as_people_write_them() -> None:
    config = EngineConfig(
        model=Path("a/b"),  # type: ignore[arg-type]
        kv_memory="512MiB",  # type: ignore[arg-type]
        swap_space="1 gb",  # type: ignore[arg-type]
        preemption="swap",
    )
    assert (config.model, config.kv_memory, config.swap_space) == ("a/b", 512 * 1024**2, 10**9)
    assert config.replace(block_size=4) == EngineConfig(
        model="a/b", kv_memory=512 * 1024**2, swap_space=10**9, preemption="swap", block_size=4
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_blocks": 8, "kv_memory": 4096}, "num_blocks=8 and kv_memory=4096 both set"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens=32 is below max_num_seqs=64"),
        ({"swap_space": 4096}, "swap_space=4096 would never be used with preemption='recompute'"),
        ({"tokenizer": "t", "skip_tokenizer_init": True}, "contradicts skip_tokenizer_init=True"),
    ],
)
def test_contradictions_are_refused_in_the_users_words(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", **settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("preemption", ["swap", "auto"])
def test_swapping_without_swap_space_is_allowed_and_falls_back(preemption: Any) -> None:  # U11
    assert EngineConfig(model="m", preemption=preemption).swap_space == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"swap_space": 80 * GIB, "preemption": "swap"},
        {"kv_memory": 8 * GIB + 1},
        {"kv_memory": 4 * GIB, "swap_space": 4 * GIB + 1, "preemption": "auto"},
    ],
)
def test_more_memory_than_the_host_has_is_refused_with_both_numbers(settings: dict[str, Any]) -> None:  # U84
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", **settings)
    for name in ("kv_memory", "swap_space"):
        if name in settings:
            assert f"{name}={settings[name]}" in str(caught.value)
    assert f"{8 * GIB} bytes (8 GiB) of memory available" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_of_the_hosts_memory_may_be_asked_for() -> None:
    EngineConfig(model="m", kv_memory=4 * GIB, swap_space=4 * GIB, preemption="swap")
