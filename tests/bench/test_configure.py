from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vtoken.base.errors import ConfigError
from vtoken.bench.arms import ARMS
from vtoken.bench.config import BenchConfig, pool_for
from vtoken.bench.configure import FULL, MODEL, QUICK, Asked, configure
from vtoken.bench.jobs import Job
from vtoken.policies.registry import resolve_policy

SMALL: dict[str, Any] = {"workloads": ("chat",), "policies": ("random",), "limit": 4}


def asked(**changes: Any) -> BenchConfig:
    return configure(Asked(**(SMALL | changes)))


def test_left_to_itself_it_measures_the_whole_matrix() -> None:  # V18
    config = configure(Asked())
    assert [workload.name for workload in config.workloads] == ["chat", "long", "reasoning"]
    assert list(config.policies) == ["h2o", "random", "scissorhands:window=64"]
    assert config.ratios == (0.3, 0.5, 0.7)
    assert config.block_sizes == (16, 32, 48)
    assert config.arms == ARMS
    assert config.sweeps
    assert config.num_blocks is None


def test_quick_is_a_part_of_it() -> None:
    config = configure(Asked(quick=True))
    assert set(config.policies) <= set(FULL.policies)
    assert config.ratios == QUICK.ratios == (0.5,)
    whole, part = (sum(job.num_tokens for job in made.workloads[2].jobs) for made in (configure(Asked()), config))
    assert part < whole / 5


def test_what_the_user_says_stands_before_the_preset() -> None:
    config = configure(
        Asked(
            workloads=("reasoning", "chat"),
            policies=("tova", "h2o:recent=4"),
            ratios=(0.6, 0.2),
            block_sizes=(8, 64),
            arms=("vtoken", "naive"),
            num_blocks=2000,
            limit=3,
            scale=0.5,
            seed=7,
            sweeps=False,
            quick=True,
        )
    )
    assert [workload.name for workload in config.workloads] == ["reasoning", "chat"]
    assert [len(workload.jobs) for workload in config.workloads] == [3, 3]
    assert config.policies == {"tova": resolve_policy("tova"), "h2o:recent=4": resolve_policy("h2o:recent=4")}
    assert config.ratios == (0.2, 0.6)
    assert config.block_sizes == (8, 64)
    assert config.arms == ("naive", "vtoken"), "in the order in which they are compared"
    assert (config.num_blocks, config.seed, config.sweeps) == (2000, 7, False)


def test_all_workloads_by_one_word() -> None:
    assert len(asked(workloads=("all",)).workloads) == 3


def test_a_trace_is_the_workload(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:49,96,10\n")
    config = asked(workloads=(), trace=path, limit=None)
    assert [workload.jobs for workload in config.workloads] == [(Job(0.0, 374, 44), Job(3.0, 96, 10))]
    assert asked(workloads=(), trace=path, at_once=True, scale=0.5).workloads[0].jobs[1] == Job(0.0, 48, 5)
    assert len(asked(workloads=(), trace=path, limit=1).workloads[0].jobs) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"workloads": ("chats",)},
            "workload: unknown 'chats'; did you mean 'chat'? known: chat, long, reasoning, all",
        ),
        ({"policies": ("h20",)}, "policy: "),
        ({"policies": ("h2o:recent=x",)}, "policy: "),
        ({"policies": ("pyramidkv",)}, "policy: "),
        ({"ratios": (0.0,)}, "ratio: expected the share of a text to erase, above 0 and below 1, got 0"),
        ({"ratios": (1.0,)}, "ratio: expected"),
        ({"ratios": (float("nan"),)}, "ratio: expected"),
        ({"block_sizes": (2,)}, "block_size: expected a whole number of tokens from 4 to 256, got 2"),
        ({"arms": ("vtokens",)}, "arms: unknown arm 'vtokens'; did you mean 'vtoken'?"),
        ({"shape": "llama-3.1-9b"}, "shape: unknown model 'llama-3.1-9b'; did you mean 'llama-3.1-8b'?"),
        ({"device": "h300"}, "device: unknown 'h300'"),
        ({"num_blocks": 0}, "pool: expected a number of blocks from 1 to 2147483647, or auto, got 0"),
        ({"num_blocks": 3}, "pool: 3 blocks of 16 tokens are too few for chat: its longest text has"),
        ({"limit": 0}, "limit: expected a number of requests from 1 to 1000000, got 0"),
        ({"scale": 0.0}, "scale: expected a factor above 0"),
        ({"scale": float("inf")}, "scale: expected a factor above 0"),
        ({"seed": -1}, "seed: expected a whole number from 0"),
        ({"trace": Path("/nowhere/trace")}, "workload: a trace is the workload; give one of the two"),
        ({"trace": Path("/nowhere/trace"), "workloads": ()}, "trace: /nowhere/trace cannot be read"),
        (
            {"scale": 100.0, "shape": "smollm2-135m"},
            "but smollm2-135m has positions for 8192 only; give a smaller scale",
        ),
        ({"policies": ("streaming_llm:recent=5000",)}, "protects more than 70% of every prompt of chat"),
        ({"model": "/nowhere/model"}, "/nowhere/model does not exist"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, Exception)) as caught:
        asked(**changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_automatic_pool_holds_five_requests_of_mean_length_or_the_longest() -> None:
    chat = asked(limit=48).workloads[0]
    mean = (chat.mean_prompt + chat.mean_output) / 16
    assert pool_for(chat, 16) == int(5 * mean)
    one = asked(limit=1).workloads[0]
    assert pool_for(one, 16) * 16 >= one.longest


def test_a_real_model_is_asked_for_its_limits_first(model_folder: Callable[[], Path]) -> None:
    with pytest.raises(ConfigError, match="has positions for 128 only; give a smaller scale"):
        configure(Asked(model=str(model_folder()), workloads=("reasoning",)))
    config = configure(Asked(model=str(model_folder()), workloads=("chat",), scale=0.05))
    assert config.ratios == MODEL.ratios
    assert not config.sweeps
